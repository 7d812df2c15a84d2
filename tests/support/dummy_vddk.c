/* A stub of VMware's libvixDiskLib, which may not be redistributed: raw files as disks, for nbdkit's real vddk
 * plugin. Its settings are in a file "settings" beside its folder lib64, one NAME=VALUE per line:
 *
 *   root=DIR             "[ds] vm/d.vmdk" is DIR/ds/vm/d.vmdk
 *   user= password= thumbprint= vm=   what a connection must present; unchecked if missing
 *   snapshot=            the snapshot that a connection must name
 *   log=FILE             one line for each call, and "Config LINE" for each line of VDDK's configuration
 *   fail=connect|open|qab|qab@SECTOR|read@SECTOR
 *   delay=MICROSECONDS   before each read
 *
 * The file is read for each connection, so the faults can change during a test.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))
#define SECTOR 512
#define MIN_CHUNK 128

typedef uint64_t VixError;
enum { VIX_OK = 0, VIX_E_FAIL = 1, VIX_E_FILE_NOT_FOUND = 4, VIX_E_NOT_SUPPORTED = 6, VIX_E_FILE_ACCESS_ERROR = 13,
       VIX_E_HOST_USER_PASS = 18, VIX_ASYNC = 25000 };

typedef void Log(const char *format, va_list);
typedef void Completion(void *data, VixError result);

struct params { /* VixDiskLibConnectParams of VDDK 7 and 8 */
    char *vm, *server, *thumbprint;
    long reserved1;
    int credentials;
    union {
        struct { char *user, *password; } uid;
        struct { char *cookie, *user, *key; } session;
        void *reserved;
    } with;
    uint32_t port, nfc_port;
    char *reserved2, reserved3[8];
    void *reserved4;
    struct { char *id, *ds, *ssid; } spec;
    int spec_type;
};
struct geometry { uint32_t cylinders, heads, sectors; };
struct info {
    struct geometry bios, physical;
    uint64_t capacity;
    int adapter, links;
    char *parent, *uuid;
    uint32_t logical_sector, physical_sector;
};
struct blocks { uint32_t count; struct { uint64_t offset, length; } block[1]; };
struct settings { char root[1024], user[256], password[256], thumbprint[256], vm[256], snapshot[256], log[1024], fail[64]; int delay; };
struct handle { int fd; uint64_t sectors; struct settings now; };

static char settings_path[4096];
static Log *log_debug, *log_error;

static struct settings settings(void) {
    struct settings now = {0};
    struct { const char *name; char *value; size_t size; } known[] = {
        {"root", now.root, sizeof now.root}, {"user", now.user, sizeof now.user},
        {"password", now.password, sizeof now.password}, {"thumbprint", now.thumbprint, sizeof now.thumbprint},
        {"vm", now.vm, sizeof now.vm}, {"snapshot", now.snapshot, sizeof now.snapshot},
        {"log", now.log, sizeof now.log}, {"fail", now.fail, sizeof now.fail},
    };
    char line[2048];
    FILE *file = fopen(settings_path, "re");
    while (file && fgets(line, sizeof line, file)) {
        char *equals = strchr(line, '=');
        if (!equals) continue;
        *equals++ = 0;
        equals[strcspn(equals, "\n")] = 0;
        if (!strcmp(line, "delay")) now.delay = atoi(equals);
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (!strcmp(line, known[i].name)) snprintf(known[i].value, known[i].size, "%s", equals);
    }
    if (file) fclose(file);
    return now;
}

static void say(Log *log, const char *format, ...) {
    va_list list;
    if (!log) return;
    va_start(list, format);
    log(format, list);
    va_end(list);
}

static void note(const struct settings *now, const char *format, ...) {
    char line[2048];
    va_list list;
    int fd, length;
    if (!now->log[0] || (fd = open(now->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) < 0) return;
    va_start(list, format);
    length = vsnprintf(line, sizeof line - 1, format, list);
    va_end(list);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (write(fd, line, length) < 0) { }
    close(fd);
}

static int differs(const char *wanted, const char *got) { return wanted[0] && (!got || strcmp(wanted, got)); }

PUBLIC VixError VixDiskLib_InitEx(uint32_t major, uint32_t minor, Log *debug, Log *error, Log *panic,
                                  const char *libdir, const char *config) {
    struct settings now;
    log_debug = debug;
    log_error = error;
    snprintf(settings_path, sizeof settings_path, "%s/settings", libdir);
    now = settings();
    note(&now, "InitEx %u.%u config=%s", major, minor, config ? config : "");
    char line[256];
    FILE *file = config ? fopen(config, "re") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        note(&now, "Config %s", line);
    }
    if (file) fclose(file);
    say(log_debug, "VMware VixDiskLib (8.0.1) Release build-21562716");
    return VIX_OK;
}
PUBLIC void VixDiskLib_Exit(void) { }
PUBLIC const char *VixDiskLib_ListTransportModes(void) { return "file:nbdssl:nbd"; }
PUBLIC char *VixDiskLib_GetErrorText(VixError error, const char *locale) {
    switch (error) {
    case VIX_E_NOT_SUPPORTED: return strdup("The operation is not supported");
    case VIX_E_FILE_NOT_FOUND: return strdup("A file was not found");
    case VIX_E_HOST_USER_PASS: return strdup("Cannot connect to host: Incorrect user name or password.");
    case VIX_E_FILE_ACCESS_ERROR: return strdup("You do not have access rights to this file");
    default: return strdup("Unknown error");
    }
}
PUBLIC void VixDiskLib_FreeErrorText(char *text) { free(text); }
PUBLIC struct params *VixDiskLib_AllocateConnectParams(void) { return calloc(1, sizeof(struct params)); }
PUBLIC void VixDiskLib_FreeConnectParams(struct params *params) { free(params); }

PUBLIC VixError VixDiskLib_ConnectEx(const struct params *params, char read_only, const char *snapshot,
                                     const char *modes, void **out) {
    struct settings now = settings();
    note(&now, "ConnectEx ro=%d server=%s vm=%s port=%u snapshot=%s modes=%s", read_only,
         params->server ? params->server : "", params->vm ? params->vm : "", params->port,
         snapshot ? snapshot : "", modes ? modes : "");
    if (!strcmp(now.fail, "connect")) return VIX_E_FAIL;
    if (differs(now.user, params->with.uid.user) || differs(now.password, params->with.uid.password)) {
        say(log_error, "Cannot login: Incorrect user name or password.");
        return VIX_E_HOST_USER_PASS;
    }
    if (differs(now.thumbprint, params->thumbprint)) {
        say(log_error, "SSL: Thumbprint mismatch (got %s)", params->thumbprint ? params->thumbprint : "none");
        return VIX_E_FAIL;
    }
    if (differs(now.vm, params->vm) || differs(now.snapshot, snapshot)) return VIX_E_FILE_NOT_FOUND;
    *out = malloc(1);
    return *out ? VIX_OK : VIX_E_FAIL;
}
PUBLIC VixError VixDiskLib_Disconnect(void *connection) {
    struct settings now = settings();
    note(&now, "Disconnect");
    free(connection);
    return VIX_OK;
}

PUBLIC VixError VixDiskLib_Open(void *connection, const char *path, uint32_t flags, void **out) {
    struct handle *handle = calloc(1, sizeof *handle);
    const char *end = strchr(path, ']');
    char file[4096];
    struct stat found;
    if (!handle) return VIX_E_FAIL;
    handle->now = settings();
    note(&handle->now, "Open path=%s flags=%u", path, flags);
    if (!strcmp(handle->now.fail, "open") || path[0] != '[' || !end) {
        free(handle);
        return VIX_E_FAIL;
    }
    snprintf(file, sizeof file, "%s/%.*s/%s", handle->now.root, (int)(end - path - 1), path + 1, end + 2);
    handle->fd = open(file, O_RDONLY | O_CLOEXEC);
    if (handle->fd < 0 || fstat(handle->fd, &found) < 0) {
        VixError error = errno == ENOENT ? VIX_E_FILE_NOT_FOUND : VIX_E_FILE_ACCESS_ERROR;
        free(handle);
        return error;
    }
    handle->sectors = found.st_size / SECTOR;
    say(log_debug, "DISKLIB-LINK  : Opened 'vpxa-nfcssl://%s@esx12.test.local:902' (0xa): custom, %llu sectors / 1 GB.",
        path, (unsigned long long)handle->sectors);
    *out = handle;
    return VIX_OK;
}
PUBLIC VixError VixDiskLib_Close(void *opened) {
    struct handle *handle = opened;
    note(&handle->now, "Close");
    close(handle->fd);
    free(handle);
    return VIX_OK;
}
PUBLIC const char *VixDiskLib_GetTransportMode(void *handle) { return "nbdssl"; }
PUBLIC VixError VixDiskLib_GetInfo(void *opened, struct info **out) {
    struct handle *handle = opened;
    struct info *info = calloc(1, sizeof *info);
    if (!info) return VIX_E_FAIL;
    info->capacity = handle->sectors;
    info->adapter = 3;
    info->links = 1;
    info->logical_sector = info->physical_sector = SECTOR;
    *out = info;
    return VIX_OK;
}
PUBLIC void VixDiskLib_FreeInfo(struct info *info) { free(info); }

/* Whether the setting is a sector of this range, after ``what``. */
static int fails(const struct handle *handle, const char *what, uint64_t start, uint64_t count) {
    size_t length = strlen(what);
    uint64_t bad;
    if (strncmp(handle->now.fail, what, length)) return 0;
    bad = strtoull(handle->now.fail + length, NULL, 10);
    return bad >= start && bad < start + count;
}

static VixError pull(struct handle *handle, uint64_t start, uint64_t count, unsigned char *into) {
    size_t wanted = count * SECTOR, got = 0;
    note(&handle->now, "Read %llu+%llu", (unsigned long long)start, (unsigned long long)count);
    if (handle->now.delay) usleep(handle->now.delay);
    if (fails(handle, "read@", start, count)) return VIX_E_FAIL;
    while (got < wanted) {
        ssize_t now = pread(handle->fd, into + got, wanted - got, start * SECTOR + got);
        if (now < 0 && errno == EINTR) continue;
        if (now <= 0) return VIX_E_FAIL;
        got += now;
    }
    note(&handle->now, "Done %llu+%llu", (unsigned long long)start, (unsigned long long)count);
    return VIX_OK;
}

/* The real library has several buffers in flight for each disk, too. */
struct request { struct handle *handle; uint64_t start, count; unsigned char *into; Completion *done; void *data; };

static void *answer(void *given) {
    struct request request = *(struct request *)given;
    free(given);
    request.done(request.data, pull(request.handle, request.start, request.count, request.into));
    return NULL;
}
PUBLIC VixError VixDiskLib_Read(void *handle, uint64_t start, uint64_t count, unsigned char *into) {
    return pull(handle, start, count, into);
}
PUBLIC VixError VixDiskLib_ReadAsync(void *handle, uint64_t start, uint64_t count, unsigned char *into,
                                     Completion *done, void *data) {
    struct request *request = malloc(sizeof *request);
    pthread_t thread;
    if (!request) return VIX_E_FAIL;
    *request = (struct request){handle, start, count, into, done, data};
    if (pthread_create(&thread, NULL, answer, request)) {
        free(request);
        return VIX_E_FAIL;
    }
    pthread_detach(thread);
    return VIX_ASYNC;
}
PUBLIC VixError VixDiskLib_Write(void *h, uint64_t s, uint64_t n, const unsigned char *b) { return VIX_E_NOT_SUPPORTED; }
PUBLIC VixError VixDiskLib_WriteAsync(void *h, uint64_t s, uint64_t n, const unsigned char *b, Completion *c, void *d) {
    return VIX_E_NOT_SUPPORTED;
}
PUBLIC VixError VixDiskLib_Flush(void *handle) { return VIX_OK; }
PUBLIC VixError VixDiskLib_Wait(void *handle) { return VIX_OK; }
PUBLIC VixError VixDiskLib_Create(void *c, const char *p, const void *cp, void *a, void *b) { return VIX_E_NOT_SUPPORTED; }

PUBLIC VixError VixDiskLib_QueryAllocatedBlocks(void *opened, uint64_t start, uint64_t count, uint64_t chunk,
                                                struct blocks **out) {
    struct handle *handle = opened;
    uint64_t end = start + count, unit = chunk * SECTOR, position = start * SECTOR, room = 16;
    struct blocks *list;
    note(&handle->now, "QueryAllocatedBlocks %llu+%llu", (unsigned long long)start, (unsigned long long)count);
    if (!strcmp(handle->now.fail, "qab") || chunk < MIN_CHUNK || start % chunk || count % chunk || end > handle->sectors)
        return VIX_E_FAIL; /* as the real library */
    if (fails(handle, "qab@", start, count)) return VIX_E_FAIL;
    if (!(list = malloc(sizeof *list + room * sizeof list->block[0]))) return VIX_E_FAIL;
    list->count = 0;
    end *= SECTOR;
    while (position < end) {
        off_t data = lseek(handle->fd, position, SEEK_DATA), hole;
        uint64_t first, last;
        if (data < 0 || (uint64_t)data >= end) break;
        hole = lseek(handle->fd, data, SEEK_HOLE);
        first = data / unit * unit;
        last = (hole + unit - 1) / unit * unit;
        if (first < position) first = position;
        if (last > end) last = end;
        if (list->count == room) {
            room *= 2;
            if (!(list = realloc(list, sizeof *list + room * sizeof list->block[0]))) return VIX_E_FAIL;
        }
        list->block[list->count].offset = first / SECTOR;
        list->block[list->count++].length = (last - first) / SECTOR;
        position = last;
    }
    *out = list;
    return VIX_OK;
}
PUBLIC VixError VixDiskLib_FreeBlockList(struct blocks *list) {
    free(list);
    return VIX_OK;
}
