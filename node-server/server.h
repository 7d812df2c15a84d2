/* cdi-containerimage-server: serves the one disk of a container image on loopback (contract, Node pull). */
#ifndef SERVER_H
#define SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

enum {
    HEAD_LIMIT = 16384,  /* bytes of a request's line and headers */
    HEAD_SECONDS = 20,   /* for all of them to come, from the first byte on */
    IDLE_SECONDS = 300,  /* for the next request of a kept connection, and for a client to take bytes */
};

/* The file that is served; it is open, so no request ever names a path of the file system. */
struct disk {
    int fd;
    off_t size;
    const char *name; /* below the image directory */
    char etag[64];
    char modified[40];
};

/* What a client asks for. last < 0: to the end; first < 0: so many bytes from the end. */
struct request {
    bool is_head;
    bool closes;
    bool has_range;
    long long first, last;
    const char *if_range; /* in the request's buffer; NULL when absent */
    const char *if_match;
    char path[HEAD_LIMIT];
};

/* End the program with a sentence on standard error and in the container's termination message. */
_Noreturn void refuse_to_serve(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Find and open the one file below a directory, or refuse to serve. */
struct disk open_disk(const char *directory);

/* Serve one client until it or its patience ends. */
void serve_connection(int client, const struct disk *disk);

/* Read a request from its text, which is changed and ends in NUL. Return 0, or the status to refuse it with. */
int parse_request(char *text, size_t length, struct request *request);

/* Answer, and return whether the connection is still good. */
bool answer(int client, const struct disk *disk, const struct request *request);
bool answer_status(int client, int status, const char *headers, bool is_head);

/* Return {"env":["K=V",…]} in new memory, NULL without memory. */
char *environment_as_json(void);

#endif
