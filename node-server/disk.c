/* The only file in the image directory. */
#include "server.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static char found[4096]; /* nftw passes no argument to its callback */

static int take(const char *path, const struct stat *status, int kind, struct FTW *where)
{
    (void)where;
    if (kind == FTW_D)
        return 0;
    if (kind == FTW_DNR || kind == FTW_NS)
        refuse_to_serve("%s: %s (user %d)", path, strerror(errno), (int)getuid());
    /* A link could lead to credentials that the kubelet mounts beside the image. */
    if (!S_ISREG(status->st_mode))
        refuse_to_serve("%s is not a regular file", path);
    if (*found)
        refuse_to_serve("more than one file: %s and %s; an image must contain one disk", found, path);
    if (strlen(path) >= sizeof found)
        refuse_to_serve("%.100s…: the path is too long", path);
    strcpy(found, path);
    return 0;
}

/* The importer reads the ready file as one line and strips white space. */
static bool fits_ready_file(const char *name)
{
    size_t length = strlen(name);
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)name[i] < ' ' || name[i] == 0x7f)
            return false;
    return length && name[0] != ' ' && name[length - 1] != ' ';
}

struct disk open_disk(const char *directory)
{
    size_t length = strlen(directory);
    while (length > 1 && directory[length - 1] == '/')
        length--;
    char top[4096];
    if (length >= sizeof top)
        refuse_to_serve("%.100s…: the path is too long", directory);
    snprintf(top, sizeof top, "%.*s", (int)length, directory);
    struct stat status;
    if (lstat(top, &status) || !S_ISDIR(status.st_mode))
        refuse_to_serve("%s is not a directory of this image: it contains no disk to import", top);
    if (nftw(top, take, 8, FTW_PHYS))
        refuse_to_serve("%s: %s (user %d)", top, strerror(errno), (int)getuid());
    if (!*found)
        refuse_to_serve("no file below %s: the image contains no disk to import", top);

    struct disk disk = {.name = found + length + (top[length - 1] != '/')};
    if (!fits_ready_file(disk.name))
        refuse_to_serve("the name of the file below %s contains control characters, or begins or ends with a space", top);
    disk.fd = open(found, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (disk.fd < 0 || fstat(disk.fd, &status) || !S_ISREG(status.st_mode))
        refuse_to_serve("%s: %s (user %d)", found, strerror(errno), (int)getuid());
    disk.size = status.st_size;
    snprintf(disk.etag, sizeof disk.etag, "\"%llx-%llx.%lx\"", (unsigned long long)status.st_size,
             (unsigned long long)status.st_mtim.tv_sec, status.st_mtim.tv_nsec);
    strftime(disk.modified, sizeof disk.modified, "%a, %d %b %Y %H:%M:%S GMT", gmtime(&status.st_mtim.tv_sec));
    return disk;
}
