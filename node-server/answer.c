/* Responses: the disk or a range of it, the environment, or an error. */
#include "server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <time.h>

static const char *reason(int status)
{
    switch (status) {
    case 200: return "OK";
    case 206: return "Partial Content";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 408: return "Request Timeout";
    case 412: return "Precondition Failed";
    case 413: return "Content Too Large";
    case 416: return "Range Not Satisfiable";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    case 505: return "HTTP Version Not Supported";
    default: return "Bad Request";
    }
}

static bool send_all(int client, const char *data, size_t length, int flags)
{
    while (length) {
        ssize_t count = send(client, data, length, flags | MSG_NOSIGNAL);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return false;
        data += count;
        length -= (size_t)count;
    }
    return true;
}

static bool send_head(int client, int status, const char *headers, long long length, int flags)
{
    char text[2048], date[40];
    time_t seconds = time(NULL);
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime(&seconds));
    int size = snprintf(text, sizeof text, "HTTP/1.1 %d %s\r\nDate: %s\r\nContent-Length: %lld\r\n%s\r\n", status,
                        reason(status), date, length, headers);
    return size < (int)sizeof text && send_all(client, text, (size_t)size, flags);
}

static bool send_text(int client, int status, const char *headers, const char *text, bool is_head)
{
    size_t length = strlen(text);
    return send_head(client, status, headers, (long long)length, is_head ? 0 : MSG_MORE) &&
           (is_head || send_all(client, text, length, 0));
}

static bool send_disk(int client, const struct disk *disk, off_t start, off_t end)
{
    while (start < end) {
        ssize_t count = sendfile(client, disk->fd, &start, (size_t)(end - start));
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) /* the client closed the connection, or the file was truncated */
            return false;
    }
    return true;
}

bool answer_status(int client, int status, const char *headers, bool is_head)
{
    char all[512], text[64];
    /* After a malformed request, where the next one begins is unknown. */
    bool closes = status == 503 || (status >= 400 && status != 404 && status != 412 && status != 416);
    snprintf(all, sizeof all, "%sContent-Type: text/plain\r\n%s", headers, closes ? "Connection: close\r\n" : "");
    snprintf(text, sizeof text, "%d %s\n", status, reason(status));
    return send_text(client, status, all, text, is_head);
}

static bool answer_info(int client, const struct request *request)
{
    char *text = environment_as_json();
    bool good = text && send_text(client, 200, "Content-Type: application/json\r\n", text, request->is_head);
    free(text);
    return good;
}

static bool answer_disk(int client, const struct disk *disk, const struct request *request)
{
    char headers[512], range[128] = "";
    off_t start = 0, end = disk->size;
    int status = 200;
    if (request->if_match && strcmp(request->if_match, "*") != 0 && strcmp(request->if_match, disk->etag) != 0)
        return answer_status(client, 412, "", request->is_head);
    if (request->has_range && (!request->if_range || strcmp(request->if_range, disk->etag) == 0)) {
        start = request->first >= 0 ? request->first : disk->size + request->first;
        start = start < 0 ? 0 : start;
        if (request->last >= 0 && request->last < end)
            end = request->last + 1;
        if (start >= disk->size) {
            snprintf(range, sizeof range, "Content-Range: bytes */%lld\r\n", (long long)disk->size);
            return answer_status(client, 416, range, request->is_head);
        }
        status = 206;
        snprintf(range, sizeof range, "Content-Range: bytes %lld-%lld/%lld\r\n", (long long)start, (long long)end - 1,
                 (long long)disk->size);
    }
    snprintf(headers, sizeof headers,
             "Content-Type: application/octet-stream\r\nAccept-Ranges: bytes\r\nETag: %s\r\nLast-Modified: %s\r\n%s%s",
             disk->etag, disk->modified, range, request->closes ? "Connection: close\r\n" : "");
    return send_head(client, status, headers, (long long)(end - start), request->is_head ? 0 : MSG_MORE) &&
           (request->is_head || send_disk(client, disk, start, end));
}

bool answer(int client, const struct disk *disk, const struct request *request)
{
    if (strcmp(request->path, "/info") == 0)
        return answer_info(client, request);
    if (strcmp(request->path + 1, disk->name) == 0)
        return answer_disk(client, disk, request);
    return answer_status(client, 404, "", request->is_head);
}
