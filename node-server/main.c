/* Options, ready and done files, and one process for each connection. */
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CLIENTS = 64, TURN_MILLISECONDS = 100 };

struct options {
    const char *port, *image_dir, *ready_file, *done_file;
};

static volatile sig_atomic_t stopped;

static void stop(int number)
{
    stopped = number;
}

static _Noreturn void usage(void)
{
    fputs("usage: cdi-containerimage-server [-p PORT] [-image-dir DIR] [-ready-file FILE] [-done-file FILE]\n", stderr);
    exit(2);
}

/* Flags as in Go: -name value or -name=value, with one dash or two. */
static void read_options(int count, char **words, struct options *options)
{
    struct { const char *name, **value; } known[] = {
        {"p", &options->port},
        {"image-dir", &options->image_dir},
        {"ready-file", &options->ready_file},
        {"done-file", &options->done_file},
    };
    for (int i = 1; i < count; i++) {
        size_t dashes = strspn(words[i], "-");
        char *name = words[i] + dashes, *equals = strchr(name, '=');
        const char **found = NULL;
        if (equals)
            *equals = 0;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if ((dashes == 1 || dashes == 2) && strcmp(name, known[k].name) == 0)
                found = known[k].value;
        if (!found || (!equals && i + 1 == count))
            usage();
        *found = equals ? equals + 1 : words[++i];
    }
}

/* Bootable container images have labels, but labels are not visible inside the container. These paths are. */
static void refuse_bootable(void)
{
    static const char *const signs[] = {"/usr/lib/bootc", "/ostree", "/sysroot/ostree"};
    struct stat ignored;
    for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
        if (lstat(signs[i], &ignored) == 0)
            refuse_to_serve("this is a bootable container image (bootc or ostree: it contains %s), not a disk; "
                            "build a disk from it first, for example with bootc-image-builder", signs[i]);
}

static int listen_on(const char *text)
{
    char *end;
    long port = strtol(text, &end, 10);
    if (end == text || *end || port < 1 || port > 65535)
        usage();
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), one = 1;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((in_port_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    /* After a container restart the port may still be in TIME_WAIT. */
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) ||
        bind(fd, (struct sockaddr *)&address, sizeof address) || listen(fd, CLIENTS))
        refuse_to_serve("cannot listen on 127.0.0.1:%ld: %s", port, strerror(errno));
    return fd;
}

/* Write atomically: the importer reads the file as soon as it exists. */
static void write_ready_file(const char *path, const char *content)
{
    char part[4096];
    if (snprintf(part, sizeof part, "%s.part", path) >= (int)sizeof part)
        usage();
    int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    size_t length = strlen(content);
    if (fd < 0 || write(fd, content, length) != (ssize_t)length || fchmod(fd, 0644) || close(fd) || rename(part, path))
        refuse_to_serve("cannot write the ready file %s: %s", path, strerror(errno));
}

static pid_t start(int client, int listener, const struct disk *disk)
{
    pid_t parent = getpid(), child = fork();
    if (child)
        return child;
    close(listener);
    signal(SIGTERM, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent)
        serve_connection(client, disk);
    _exit(0);
}

static void reap(pid_t *clients)
{
    pid_t ended;
    while ((ended = waitpid(-1, NULL, WNOHANG)) > 0)
        for (int i = 0; i < CLIENTS; i++)
            if (clients[i] == ended)
                clients[i] = 0;
}

static void accept_one(int listener, const struct disk *disk, pid_t *clients)
{
    int client = accept4(listener, NULL, NULL, SOCK_CLOEXEC), slot = 0;
    if (client < 0)
        return;
    while (slot < CLIENTS && clients[slot])
        slot++;
    pid_t child = slot < CLIENTS ? start(client, listener, disk) : -1;
    if (child > 0)
        clients[slot] = child;
    else
        answer_status(client, 503, "Retry-After: 1\r\n", false);
    close(client);
}

int main(int count, char **words)
{
    struct options options = {"8100", "/disk", "/shared/ready", "/shared/done"};
    read_options(count, words, &options);
    /* Process 1 of a container ignores signals that have no handler. */
    sigaction(SIGTERM, &(struct sigaction){.sa_handler = stop}, NULL);
    sigaction(SIGINT, &(struct sigaction){.sa_handler = stop}, NULL);
    signal(SIGPIPE, SIG_IGN);
    /* A ready file left by an earlier start would announce a server that is not listening yet. */
    unlink(options.ready_file);
    refuse_bootable();
    struct disk disk = open_disk(options.image_dir);
    int listener = listen_on(options.port);
    write_ready_file(options.ready_file, disk.name);
    fprintf(stderr, "serving %s (%lld bytes) on 127.0.0.1:%s\n", disk.name, (long long)disk.size, options.port);

    pid_t clients[CLIENTS] = {0};
    while (!stopped && access(options.done_file, F_OK)) {
        struct pollfd ready = {.fd = listener, .events = POLLIN};
        if (poll(&ready, 1, TURN_MILLISECONDS) > 0)
            accept_one(listener, &disk, clients);
        reap(clients);
    }
    for (int i = 0; i < CLIENTS; i++)
        if (clients[i] > 0)
            kill(clients[i], SIGKILL);
    return stopped ? 128 + stopped : 0;
}
