// One TLS connection as a Stream around a Stream, by OpenSSL: rpc/transport/tls.h makes them.
#pragma once

#include <openssl/ssl.h>

#include <memory>
#include <optional>
#include <string>

#include "rpc/transport/openssl_ptr.h"
#include "rpc/transport/stream.h"

namespace sparserow::rpc {

using ContextPtr = OpensslPtr<SSL_CTX, SSL_CTX_free>;

// host: the name that a client has dialled; nullopt: the stream is a server's.
[[nodiscard]] std::unique_ptr<Stream> make_tls_stream(std::unique_ptr<Stream> under, SSL_CTX* context,
                                                      const std::optional<std::string>& host);

// The oldest entry of this thread's error queue, which is emptied.
[[nodiscard]] std::string last_tls_error();

}  // namespace sparserow::rpc
