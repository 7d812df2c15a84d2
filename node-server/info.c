/* The environment of the container as set by its image. The importer makes labels from it. */
#include "server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Return the length of the UTF-8 sequence at text (RFC 3629), or 0 if it is not valid UTF-8. */
static size_t sequence(const unsigned char *text)
{
    static const struct { unsigned char low, high, second_low, second_high; size_t length; } forms[] = {
        {0x00, 0x7f, 0x00, 0x00, 1}, {0xc2, 0xdf, 0x80, 0xbf, 2}, {0xe0, 0xe0, 0xa0, 0xbf, 3},
        {0xe1, 0xec, 0x80, 0xbf, 3}, {0xed, 0xed, 0x80, 0x9f, 3}, {0xee, 0xef, 0x80, 0xbf, 3},
        {0xf0, 0xf0, 0x90, 0xbf, 4}, {0xf1, 0xf3, 0x80, 0xbf, 4}, {0xf4, 0xf4, 0x80, 0x8f, 4},
    };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
        if (text[0] < forms[i].low || text[0] > forms[i].high)
            continue;
        for (size_t k = 1; k < forms[i].length; k++)
            if (text[k] < (k == 1 ? forms[i].second_low : 0x80) || text[k] > (k == 1 ? forms[i].second_high : 0xbf))
                return 0;
        return forms[i].length;
    }
    return 0;
}

static void write_string(FILE *out, const char *string)
{
    const unsigned char *text = (const unsigned char *)string;
    fputc('"', out);
    while (*text) {
        size_t length = sequence(text);
        if (!length)
            fputs("\\ufffd", out);
        else if (*text < ' ' || *text == 0x7f)
            fprintf(out, "\\u%04x", *text);
        else if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else
            fwrite(text, 1, length, out);
        text += length ? length : 1;
    }
    fputc('"', out);
}

char *environment_as_json(void)
{
    char *text = NULL;
    size_t length;
    FILE *out = open_memstream(&text, &length);
    if (!out)
        return NULL;
    fputs("{\"env\":[", out);
    for (char **each = environ; each && *each; each++) {
        if (each != environ)
            fputc(',', out);
        write_string(out, *each);
    }
    fputs("]}\n", out);
    return fclose(out) ? NULL : text;
}
