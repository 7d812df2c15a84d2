/* Refusing to serve: a message for the user, then exit. */
#include "server.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void refuse_to_serve(const char *format, ...)
{
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "cdi-containerimage-server: %s\n", text);
    /* The kubelet mounts this file into every container. Elsewhere it does not exist and is not created. */
    int log = open("/dev/termination-log", O_WRONLY | O_TRUNC | O_CLOEXEC);
    if (log >= 0 && write(log, text, strlen(text)) < 0)
        perror("termination message");
    exit(1);
}
