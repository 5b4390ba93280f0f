#include "rpc/tls.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "rpc/openssl_ptr.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kRecordBytes = 16u << 10;   // the largest record of TLS
constexpr std::size_t kReadAhead = 64u << 10;     // taken from the socket at once
constexpr std::size_t kWriteAtOnce = 256u << 10;  // of one piece

using ContextPtr = OpensslPtr<SSL_CTX, SSL_CTX_free>;
using SslPtr = OpensslPtr<SSL, SSL_free>;

// The oldest entry of this thread's error queue, which is emptied.
std::string last_error() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "no reason given" : reason;
}

Status at_fault(const char* what) { return Status(Code::kInvalidArgument, std::string(what) + ": " + last_error()); }

BioPtr reader_of(const std::string& text) {
  return BioPtr(BIO_new_mem_buf(text.data(), static_cast<int>(std::min<std::size_t>(text.size(), INT32_MAX))));
}

int no_passphrase(char* /*out*/, int /*size*/, int /*writing*/, void* /*unused*/) { return -1; }

// All certificates of a text in order; at least one.
Result<std::vector<CertificatePtr>> certificates_of(const std::string& text, const char* what) {
  ERR_clear_error();
  const BioPtr reader = reader_of(text);
  std::vector<CertificatePtr> found;
  while (X509* one = PEM_read_bio_X509(reader.get(), nullptr, no_passphrase, nullptr)) found.emplace_back(one);
  const unsigned long error = ERR_peek_last_error();
  const bool at_end = ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
  if (found.empty() || !at_end) return at_fault(what);
  ERR_clear_error();
  return found;
}

Status use_certificate(SSL_CTX* context, const TlsTexts& texts) {
  auto chain = certificates_of(texts.certificate, "certificate");
  SR_RETURN_IF_ERROR(chain.status());
  const KeyPtr key(PEM_read_bio_PrivateKey(reader_of(texts.key).get(), nullptr, no_passphrase, nullptr));
  if (!key) return at_fault("key");
  if (SSL_CTX_use_certificate(context, chain.value()[0].get()) != 1) return at_fault("certificate");
  for (std::size_t i = 1; i < chain.value().size(); ++i) {
    if (SSL_CTX_add1_chain_cert(context, chain.value()[i].get()) != 1) return at_fault("certificate");
  }
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1 || SSL_CTX_check_private_key(context) != 1) {
    return at_fault("key (is it the certificate's?)");
  }
  return Status::ok();
}

Status trust(SSL_CTX* context, const std::string& authorities) {
  auto trusted = certificates_of(authorities, "authorities");
  SR_RETURN_IF_ERROR(trusted.status());
  for (const CertificatePtr& one : trusted.value()) {
    if (X509_STORE_add_cert(SSL_CTX_get_cert_store(context), one.get()) != 1) return at_fault("authorities");
  }
  return Status::ok();
}

ContextPtr make_context(const SSL_METHOD* method) {
  ContextPtr context(SSL_CTX_new(method));
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  // Frames have lengths: a stream cut short is noticed without TLS's own end.
  SSL_CTX_set_options(context.get(), SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_mode(context.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_read_ahead(context.get(), 1);
  SSL_CTX_set_default_read_buffer_len(context.get(), kReadAhead);
  return context;
}

// ---- The stream below as OpenSSL sees it.

Stream& below(BIO* bio) { return *static_cast<Stream*>(BIO_get_data(bio)); }

// What a transfer of the stream below means to OpenSSL; the errno of its end is kept for the one above.
int outcome(BIO* bio, const Transfer& moved) {
  BIO_clear_retry_flags(bio);
  if (moved.bytes > 0) return static_cast<int>(moved.bytes);
  if (moved.want == Transfer::Want::kRead) BIO_set_retry_read(bio);
  if (moved.want == Transfer::Want::kWrite) BIO_set_retry_write(bio);
  errno = moved.error;
  return moved.ended() && moved.error == 0 ? 0 : -1;
}

int read_below(BIO* bio, char* into, int count) {
  const iovec piece{into, static_cast<std::size_t>(count)};
  const Transfer moved = below(bio).try_read(std::span(&piece, 1));
  if (moved.ended() && moved.error == 0) BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
  return outcome(bio, moved);
}

int write_below(BIO* bio, const char* from, int count) {
  const iovec piece{const_cast<char*>(from), static_cast<std::size_t>(count)};
  return outcome(bio, below(bio).try_write(std::span(&piece, 1)));
}

long control_below(BIO* bio, int command, long /*number*/, void* /*pointer*/) {
  if (command == BIO_CTRL_EOF) return BIO_test_flags(bio, BIO_FLAGS_IN_EOF) != 0 ? 1 : 0;
  return command == BIO_CTRL_FLUSH ? 1 : 0;
}

const BIO_METHOD* method_of_stream() {
  static const BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "sparserow stream");
    BIO_meth_set_read(made, read_below);
    BIO_meth_set_write(made, write_below);
    BIO_meth_set_ctrl(made, control_below);
    return made;
  }();
  return method;
}

class TlsStream final : public Stream {
 public:
  TlsStream(std::unique_ptr<Stream> under, SslPtr ssl) : under_(std::move(under)), ssl_(std::move(ssl)) {
    BIO* bio = BIO_new(method_of_stream());
    BIO_set_data(bio, under_.get());
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl_.get(), bio, bio);  // owns it
  }
  [[nodiscard]] int fd() const noexcept override { return under_->fd(); }

  // Goes on until the pieces are full or nothing is left here and below.
  Transfer try_read(std::span<const iovec> into) noexcept override {
    std::size_t total = 0;
    for (const iovec& piece : into) {
      std::size_t filled = 0;
      while (filled < piece.iov_len) {
        std::size_t count = 0;
        ERR_clear_error();
        const int done =
            SSL_read_ex(ssl_.get(), static_cast<std::byte*>(piece.iov_base) + filled, piece.iov_len - filled, &count);
        if (done != 1) {
          const Transfer stopped = stopped_by(done);
          return total + filled > 0 ? Transfer{total + filled, Transfer::Want::kNothing, 0} : stopped;
        }
        filled += count;
      }
      total += filled;
    }
    return {total, Transfer::Want::kNothing, 0};
  }

  // After a want the same bytes must come again, as callers of try_write give them.
  Transfer try_write(std::span<const iovec> from) noexcept override {
    std::size_t total = 0;
    std::size_t offset = 0;
    while (!from.empty()) {
      if (from[0].iov_len == offset) {
        from = from.subspan(1);
        offset = 0;
        continue;
      }
      const std::span<const std::byte> chunk = next_chunk(from, offset);
      std::size_t count = 0;
      ERR_clear_error();
      const int done = SSL_write_ex(ssl_.get(), chunk.data(), chunk.size(), &count);
      if (done != 1) {
        const Transfer stopped = stopped_by(done);
        return total > 0 ? Transfer{total, Transfer::Want::kNothing, 0} : stopped;
      }
      total += count;
      while (count > 0) {
        const std::size_t part = std::min(count, from[0].iov_len - offset);
        offset += part;
        count -= part;
        if (offset < from[0].iov_len) break;
        from = from.subspan(1);
        offset = 0;
      }
    }
    return {total, Transfer::Want::kNothing, 0};
  }

  void shutdown_write() noexcept override {
    ERR_clear_error();
    if (!ended_) SSL_shutdown(ssl_.get());  // best effort: what the socket takes now
    ERR_clear_error();
    under_->shutdown_write();
  }
  void reset() noexcept override { under_->reset(); }
  [[nodiscard]] bool has_buffered() const noexcept override { return !ended_ && SSL_has_pending(ssl_.get()) == 1; }
  [[nodiscard]] std::string why(const Transfer& ended) const override {
    return reason_.empty() ? under_->why(ended) : "TLS: " + reason_;
  }

 private:
  // The piece itself when it is large or the last, else pieces put together: a record for each would cost more.
  std::span<const std::byte> next_chunk(std::span<const iovec> from, std::size_t offset) noexcept {
    const auto* first = static_cast<const std::byte*>(from[0].iov_base) + offset;
    const std::size_t left = from[0].iov_len - offset;
    if (left >= kRecordBytes || from.size() == 1) return {first, std::min(left, kWriteAtOnce)};
    std::size_t filled = 0;
    for (const iovec& piece : from) {
      const std::size_t part = std::min(piece.iov_len - offset, gathered_.size() - filled);
      std::memcpy(gathered_.data() + filled, static_cast<const std::byte*>(piece.iov_base) + offset, part);
      filled += part;
      offset = 0;
      if (filled == gathered_.size()) break;
    }
    return {gathered_.data(), filled};
  }

  Transfer stopped_by(int done) noexcept {
    const int below_error = errno;
    switch (SSL_get_error(ssl_.get(), done)) {
      case SSL_ERROR_WANT_READ:
        return {0, Transfer::Want::kRead, 0};
      case SSL_ERROR_WANT_WRITE:
        return {0, Transfer::Want::kWrite, 0};
      case SSL_ERROR_ZERO_RETURN:
        ended_ = true;
        return {};
      case SSL_ERROR_SYSCALL:
        ended_ = true;
        return {0, Transfer::Want::kNothing, below_error};
      default:
        ended_ = true;
        note_reason();
        return {0, Transfer::Want::kNothing, EPROTO};
    }
  }

  void note_reason() noexcept {
    if (!reason_.empty()) return;
    const long verified = SSL_get_verify_result(ssl_.get());
    const bool is_plain = ERR_GET_REASON(ERR_peek_error()) == SSL_R_WRONG_VERSION_NUMBER;
    reason_ = is_plain ? "the peer does not speak it" : last_error();
    if (verified != X509_V_OK) reason_ += std::string(" (") + X509_verify_cert_error_string(verified) + ")";
  }

  std::unique_ptr<Stream> under_;  // outlives ssl_, whose BIO names it
  SslPtr ssl_;
  std::array<std::byte, kRecordBytes> gathered_{};
  std::string reason_;
  bool ended_ = false;
};

}  // namespace

class TlsContext::Impl {
 public:
  ContextPtr context;
};

TlsContext::TlsContext(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsContext::~TlsContext() = default;

Result<std::shared_ptr<const TlsContext>> TlsContext::for_server(const TlsTexts& texts) {
  ContextPtr context = make_context(TLS_server_method());
  SR_RETURN_IF_ERROR(use_certificate(context.get(), texts));
  if (!texts.authorities.empty()) {
    SR_RETURN_IF_ERROR(trust(context.get(), texts.authorities));
    SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  }
  return std::shared_ptr<const TlsContext>(new TlsContext(std::make_unique<Impl>(std::move(context))));
}

Result<std::shared_ptr<const TlsContext>> TlsContext::for_client(const TlsTexts& texts) {
  ContextPtr context = make_context(TLS_client_method());
  SR_RETURN_IF_ERROR(trust(context.get(), texts.authorities));
  SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  if (!texts.certificate.empty()) SR_RETURN_IF_ERROR(use_certificate(context.get(), texts));
  return std::shared_ptr<const TlsContext>(new TlsContext(std::make_unique<Impl>(std::move(context))));
}

std::unique_ptr<Stream> TlsContext::accept(std::unique_ptr<Stream> under) const {
  SslPtr ssl(SSL_new(impl_->context.get()));
  SSL_set_accept_state(ssl.get());
  return std::make_unique<TlsStream>(std::move(under), std::move(ssl));
}

std::unique_ptr<Stream> TlsContext::connect(std::unique_ptr<Stream> under, const std::string& host) const {
  SslPtr ssl(SSL_new(impl_->context.get()));
  SSL_set_connect_state(ssl.get());
  in6_addr address{};
  if (::inet_pton(AF_INET, host.c_str(), &address) == 1 || ::inet_pton(AF_INET6, host.c_str(), &address) == 1) {
    X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl.get()), host.c_str());
  } else {
    SSL_set1_host(ssl.get(), host.c_str());
    SSL_set_tlsext_host_name(ssl.get(), host.c_str());
  }
  return std::make_unique<TlsStream>(std::move(under), std::move(ssl));
}

}  // namespace sparserow::rpc
