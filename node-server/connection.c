/* One connection: read requests, one after the other. */
#include "server.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static bool can_read(int client, double deadline)
{
    struct pollfd ready = {.fd = client, .events = POLLIN};
    double left = deadline - now();
    int count;
    do
        count = poll(&ready, 1, left > 0 ? (int)(left * 1000) : 0);
    while (count < 0 && errno == EINTR);
    return count > 0;
}

/* Read up to the empty line that ends the headers. Return the length of the request line and headers;
   0: the client closed the connection or sent no request; -1: the headers are too long or too slow. */
static ssize_t read_head(int client, char *text, size_t *held)
{
    double deadline = now() + (*held ? HEAD_SECONDS : IDLE_SECONDS);
    for (;;) {
        char *end = memmem(text, *held, "\r\n\r\n", 4);
        if (end)
            return end + 4 - text;
        if (*held == HEAD_LIMIT)
            return -1;
        if (!can_read(client, deadline))
            return *held ? -1 : 0;
        ssize_t count = recv(client, text + *held, HEAD_LIMIT - *held, 0);
        if (count <= 0)
            return 0;
        /* The deadline is for all headers: sending them byte by byte does not extend it. */
        if (!*held)
            deadline = now() + HEAD_SECONDS;
        *held += (size_t)count;
    }
}

/* Let the client read the response: close() with unread data would reset the connection. */
static void drain(int client)
{
    char ignored[4096];
    double deadline = now() + 2;
    shutdown(client, SHUT_WR);
    while (can_read(client, deadline) && recv(client, ignored, sizeof ignored, 0) > 0)
        ;
}

void serve_connection(int client, const struct disk *disk)
{
    static char held[HEAD_LIMIT], text[HEAD_LIMIT + 1];
    static struct request request;
    struct timeval patience = {.tv_sec = IDLE_SECONDS};
    size_t count = 0;
    setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    for (;;) {
        ssize_t length = read_head(client, held, &count);
        if (length == 0)
            return;
        int status = length < 0 ? (count == HEAD_LIMIT ? 431 : 408) : 0;
        if (!status) {
            memcpy(text, held, (size_t)length);
            text[length] = 0;
            count -= (size_t)length;
            memmove(held, held + length, count);
            status = parse_request(text, (size_t)length, &request);
        }
        if (status) {
            answer_status(client, status, status == 405 ? "Allow: GET, HEAD\r\n" : "", false);
            drain(client);
            return;
        }
        if (!answer(client, disk, &request))
            return;
        if (request.closes) {
            drain(client);
            return;
        }
    }
}
