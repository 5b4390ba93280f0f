#include "rpc/transport/tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "rpc/transport/certificates.h"
#include "rpc/transport/openssl_ptr.h"
#include "rpc/transport/tls_stream.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kReadAhead = 64u << 10;  // taken from the socket at once
// The ciphers of TLS 1.3; both sides take the first that they share. A key of 128 bits has ten rounds, one of 256
// fourteen.
constexpr const char* kCiphers = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";

Status at_fault(const char* what) {
  return Status(Code::kInvalidArgument, std::string(what) + ": " + last_tls_error());
}

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
  SSL_CTX_set_options(context.get(), SSL_OP_IGNORE_UNEXPECTED_EOF | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                         SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_ciphersuites(context.get(), kCiphers);
  SSL_CTX_set_mode(context.get(), SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_read_ahead(context.get(), 1);
  SSL_CTX_set_default_read_buffer_len(context.get(), kReadAhead);
  return context;
}

}  // namespace

std::string_view openssl_version() noexcept { return OpenSSL_version(OPENSSL_VERSION_STRING); }

class TlsContext::Impl {
 public:
  ContextPtr context;
};

TlsContext::TlsContext(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsContext::~TlsContext() = default;

Result<std::shared_ptr<const TlsContext>> TlsContext::for_server(const TlsTexts& texts) {
  ContextPtr context = make_context(TLS_server_method());
  const auto facts = facts_of(texts.certificate);
  if (facts.is_ok() && facts.value().names == 0) return nameless_certificate();
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
  return make_tls_stream(std::move(under), impl_->context.get(), std::nullopt);
}

std::unique_ptr<Stream> TlsContext::connect(std::unique_ptr<Stream> under, const std::string& host) const {
  return make_tls_stream(std::move(under), impl_->context.get(), host);
}

}  // namespace sparserow::rpc
