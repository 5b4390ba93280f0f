// TLS 1.2 and 1.3 under the frames, by OpenSSL: a Stream around a Stream. Its handshake is part of the first reads and
// writes, so the deadline of the first frame bounds it.
//
// A server shows its certificate, and asks for one of the client when it has authorities for clients. A client checks
// the server's certificate against its authorities, and the host that it dialled against the certificate's names.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "rpc/transport/stream.h"
#include "util/status.h"

namespace sparserow::rpc {

// Returns the version of the library that is loaded, such as "3.0.19".
[[nodiscard]] std::string_view openssl_version() noexcept;

// Texts in PEM. A certificate comes with the intermediate ones after it; a key has no passphrase.
struct TlsTexts {
  std::string
      authorities;  // that are trusted: required of a client; a server without any asks clients for no certificate
  std::string certificate;  // of a server, required
  std::string key;
};

// Thread-safe, unchanged once made: a server that gets another certificate makes another one.
class TlsContext {
 public:
  // kInvalidArgument says which text is at fault and why.
  static Result<std::shared_ptr<const TlsContext>> for_server(const TlsTexts& texts);
  static Result<std::shared_ptr<const TlsContext>> for_client(const TlsTexts& texts);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  [[nodiscard]] std::unique_ptr<Stream> accept(std::unique_ptr<Stream> under) const;
  [[nodiscard]] std::unique_ptr<Stream> connect(std::unique_ptr<Stream> under, const std::string& host) const;

 private:
  class Impl;
  explicit TlsContext(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sparserow::rpc
