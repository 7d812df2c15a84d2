/* Strict parser for requests (RFC 9112): anything unusual is refused. */
#include "server.h"

#include <ctype.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* Lines end with CR LF. The only control character allowed in a line is tab. */
static bool is_clean(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        if (byte == '\r' ? text[i + 1] != '\n' : byte == '\n' ? i == 0 || text[i - 1] != '\r'
                                                              : (byte < ' ' && byte != '\t') || byte == 0x7f)
            return false;
    }
    return true;
}

static int hex(char digit)
{
    return isdigit((unsigned char)digit) ? digit - '0' : tolower((unsigned char)digit) - 'a' + 10;
}

static bool decode_path(const char *target, char *path)
{
    if (strncasecmp(target, "http://", 7) == 0) { /* absolute form, as sent to a proxy: RFC 9112, 3.2.2 */
        const char *slash = strchr(target + 7, '/');
        target = slash ? slash : "/";
    }
    if (*target != '/')
        return false;
    for (; *target; target++, path++) {
        *path = *target;
        if (*target != '%')
            continue;
        if (!isxdigit((unsigned char)target[1]) || !isxdigit((unsigned char)target[2]))
            return false;
        *path = (char)(hex(target[1]) * 16 + hex(target[2]));
        if (!*path)
            return false;
        target += 2;
    }
    *path = 0;
    return true;
}

static int parse_line(char *line, struct request *request, bool *is_old)
{
    char *target = strchr(line, ' ');
    char *version = target ? strchr(target + 1, ' ') : NULL;
    if (!version)
        return 400;
    *target++ = *version++ = 0;
    *is_old = strcmp(version, "HTTP/1.0") == 0;
    if (!*is_old && strcmp(version, "HTTP/1.1") != 0)
        return strncmp(version, "HTTP/", 5) == 0 ? 505 : 400;
    request->is_head = strcmp(line, "HEAD") == 0;
    if (!request->is_head && strcmp(line, "GET") != 0)
        return 405;
    return decode_path(target, request->path) ? 0 : 400;
}

static bool read_number(const char **text, long long *value)
{
    const char *start = *text;
    for (*value = 0; isdigit((unsigned char)**text); (*text)++)
        *value = *value > (LLONG_MAX - 9) / 10 ? LLONG_MAX : *value * 10 + (**text - '0');
    return *text > start;
}

/* Parse a single byte range. Other units and multiple ranges are ignored, as RFC 9110, 14.2 allows. The last
   header wins. */
static void parse_range(const char *value, struct request *request)
{
    request->has_range = false;
    if (strncasecmp(value, "bytes=", 6) != 0)
        return;
    value += 6;
    bool has_first = read_number(&value, &request->first);
    if (*value++ != '-')
        return;
    bool has_last = read_number(&value, &request->last);
    if (*value || (!has_first && !has_last) || (has_first && has_last && request->last < request->first))
        return;
    if (!has_first)
        request->first = -request->last;
    if (!has_first || !has_last)
        request->last = -1;
    /* "-0" selects no bytes: treat it as a range behind the end. */
    if (!has_first && !request->first)
        request->first = LLONG_MAX;
    request->has_range = true;
}

static int parse_header(char *line, struct request *request, int *hosts)
{
    size_t length = strspn(line, "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ");
    if (!length || line[length] != ':')
        return 400;
    line[length] = 0;
    char *value = line + length + 1;
    value += strspn(value, " \t");
    for (size_t end = strlen(value); end && strchr(" \t", value[end - 1]); end--)
        value[end - 1] = 0;
    if (strcasecmp(line, "Host") == 0)
        (*hosts)++;
    else if (strcasecmp(line, "Transfer-Encoding") == 0)
        return 400;
    else if (strcasecmp(line, "Content-Length") == 0)
        return strcmp(value, "0") == 0 ? 0 : 413;
    else if (strcasecmp(line, "Connection") == 0)
        request->closes |= strcasestr(value, "close") != NULL;
    else if (strcasecmp(line, "Range") == 0)
        parse_range(value, request);
    else if (strcasecmp(line, "If-Range") == 0)
        request->if_range = value;
    else if (strcasecmp(line, "If-Match") == 0)
        request->if_match = value;
    return 0;
}

int parse_request(char *text, size_t length, struct request *request)
{
    memset(request, 0, sizeof *request);
    if (!is_clean(text, length))
        return 400;
    char *line = text, *end = strstr(text, "\r\n");
    int hosts = 0;
    bool is_old = false;
    *end = 0;
    int status = parse_line(line, request, &is_old);
    for (line = end + 2; !status && *line != '\r'; line = end + 2) {
        end = strstr(line, "\r\n");
        *end = 0;
        status = parse_header(line, request, &hosts);
    }
    if (!status && (hosts > 1 || (!hosts && !is_old)))
        return 400;
    request->closes |= is_old;
    return status;
}
