/* cdi-containerimage-server: serves the only disk of a container image on loopback (docs/sources/node-pull.md). */
#ifndef SERVER_H
#define SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum {
    HEAD_LIMIT = 16384,  /* bytes of the request line and headers */
    HEAD_SECONDS = 20,   /* to receive them, from the first byte on */
    IDLE_SECONDS = 300,  /* without a request, or without the client reading */
};

/* The file that is served. It is already open: requests never name a path in the file system. */
struct disk {
    int fd;
    off_t size;
    const char *name; /* relative to the image directory */
    char etag[64];
    char modified[40];
};

/* A parsed request. last < 0: to the end; first < 0: the last -first bytes. */
struct request {
    bool is_head;
    bool closes;
    bool has_range;
    long long first, last;
    const char *if_range; /* points into the request's buffer; NULL if absent */
    const char *if_match;
    char path[HEAD_LIMIT];
};

/* Exit with a message on standard error and in the container's termination log. */
_Noreturn void refuse_to_serve(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Open the only file below a directory, or refuse to serve. */
struct disk open_disk(const char *directory);

/* Serve one client until it closes the connection or a time limit passes. */
void serve_connection(int client, const struct disk *disk);

/* Parse the NUL-terminated text of a request in place. Return 0, or the status of the refusal. */
int parse_request(char *text, size_t length, struct request *request);

/* Send a response. Return whether the connection can be used again. */
bool answer(int client, const struct disk *disk, const struct request *request);
bool answer_status(int client, int status, const char *headers, bool is_head);

/* Return {"env":["K=V",…]} in allocated memory, or NULL if out of memory. */
char *environment_as_json(void);

#endif
