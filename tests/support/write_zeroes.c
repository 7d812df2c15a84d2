/* A device with the offload of FALLOC_FL_WRITE_ZEROES, for LD_PRELOAD: writes the zeros and appends the call
 * to the file in $WRITE_ZEROES_LOG. $WRITE_ZEROES_REFUSE: the number of calls before it is refused. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WRITE_ZEROES 0x80

static int calls;

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    static char zeros[1 << 20];
    int (*real)(int, int, off_t, off_t) = dlsym(RTLD_NEXT, "fallocate");
    const char *refuse = getenv("WRITE_ZEROES_REFUSE");
    FILE *log = fopen(getenv("WRITE_ZEROES_LOG"), "a");
    fprintf(log, "%d %lld %lld\n", mode, (long long)offset, (long long)length);
    fclose(log);
    if (mode != WRITE_ZEROES)
        return real(fd, mode, offset, length);
    if (refuse && calls++ >= atoi(refuse)) {
        errno = EOPNOTSUPP;
        return -1;
    }
    while (length > 0) {
        ssize_t count = pwrite(fd, zeros, length < (off_t)sizeof zeros ? length : sizeof zeros, offset);
        if (count < 0)
            return -1;
        offset += count;
        length -= count;
    }
    return 0;
}
