/* A provider for OpenSSL 3 as on a machine with a policy: every algorithm of the default provider has the property
 * fips=yes, but MD5 and MD5-SHA1. With "default_properties = fips=yes" they exist only for callers that ask for
 * "-fips", as Python does for usedforsecurity=False.
 *
 * The algorithms run in a library context of this provider, where MACs, signatures and key derivations look for their
 * digests. There SHA-1 is missing too. Outside it is not: OpenSSL identifies certificates by it, and fails without.
 *
 * The context belongs to the system's libcrypto, whatever OpenSSL has loaded the provider: that in the wheel of
 * cryptography is another one.
 */
#include <openssl/core_dispatch.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/provider.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static OSSL_LIB_CTX *inside;
static OSSL_PROVIDER *standard;

/* The algorithms with their properties, as long as the process lives: OpenSSL keeps them. */
static const OSSL_ALGORITHM *marked(int operation, int *no_cache, const char *missing)
{
    const OSSL_ALGORITHM *all = OSSL_PROVIDER_query_operation(standard, operation, no_cache);
    size_t count = 0;
    if (all == NULL)
        return NULL;
    while (all[count].algorithm_names != NULL)
        count++;
    OSSL_ALGORITHM *found = calloc(count + 1, sizeof *found);
    for (size_t i = 0; i < count; i++) {
        const char *names = all[i].algorithm_names, *had = all[i].property_definition;
        int weak = strncmp(names, "MD5", 3) == 0 || strncmp(names, missing, strlen(missing)) == 0;
        char *properties = NULL;
        found[i] = all[i];
        /* Encoders and decoders have it already. */
        if (strstr(had, "fips=") == NULL
            && asprintf(&properties, "%s,fips=%s", had, operation == OSSL_OP_DIGEST && weak ? "no" : "yes") > 0)
            found[i].property_definition = properties;
    }
    return found;
}

static const OSSL_ALGORITHM *query(void *context, int operation, int *no_cache)
{
    (void)context;
    return marked(operation, no_cache, "MD5");
}

static const OSSL_ALGORITHM *query_inside(void *context, int operation, int *no_cache)
{
    (void)context;
    return marked(operation, no_cache, "SHA1:");
}

static int capabilities(void *context, const char *name, OSSL_CALLBACK *call, void *argument)
{
    (void)context;
    return OSSL_PROVIDER_get_capabilities(standard, name, call, argument);
}

static const OSSL_DISPATCH FUNCTIONS[] = {
    {OSSL_FUNC_PROVIDER_QUERY_OPERATION, (void (*)(void))query},
    {OSSL_FUNC_PROVIDER_GET_CAPABILITIES, (void (*)(void))capabilities},
    {0, NULL},
};
static const OSSL_DISPATCH FUNCTIONS_INSIDE[] = {
    {OSSL_FUNC_PROVIDER_QUERY_OPERATION, (void (*)(void))query_inside},
    {0, NULL},
};

static int start_inside(const OSSL_CORE_HANDLE *handle, const OSSL_DISPATCH *in, const OSSL_DISPATCH **out, void **context)
{
    (void)handle, (void)in;
    *out = FUNCTIONS_INSIDE;
    *context = OSSL_PROVIDER_get0_provider_ctx(standard);
    return 1;
}

int OSSL_provider_init(const OSSL_CORE_HANDLE *handle, const OSSL_DISPATCH *in, const OSSL_DISPATCH **out, void **context)
{
    (void)handle, (void)in;
    /* Once for the process: each OpenSSL in it starts the provider. */
    if (inside == NULL) {
        inside = OSSL_LIB_CTX_new();
        standard = OSSL_PROVIDER_load(inside, "default");
        if (standard == NULL || !OSSL_PROVIDER_add_builtin(inside, "policy", start_inside)
            || OSSL_PROVIDER_load(inside, "policy") == NULL || !EVP_set_default_properties(inside, "fips=yes"))
            return 0;
    }
    *out = FUNCTIONS;
    *context = OSSL_PROVIDER_get0_provider_ctx(standard);
    return 1;
}
