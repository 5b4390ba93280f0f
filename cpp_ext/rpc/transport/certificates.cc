#include "rpc/transport/certificates.h"

#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include "rpc/transport/openssl_ptr.h"

namespace sparserow::rpc {
namespace {

using ExtensionPtr = OpensslPtr<X509_EXTENSION, X509_EXTENSION_free>;

std::string text_of(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return {data, static_cast<std::size_t>(size)};
}

KeyPair pair_of(X509* certificate, EVP_PKEY* key) {
  const BioPtr certificate_text(BIO_new(BIO_s_mem()));
  PEM_write_bio_X509(certificate_text.get(), certificate);
  const BioPtr key_text(BIO_new(BIO_s_mem()));
  PEM_write_bio_PrivateKey(key_text.get(), key, nullptr, nullptr, 0, nullptr, nullptr);
  return {text_of(certificate_text.get()), text_of(key_text.get())};
}

bool add_extension(X509* certificate, X509* issuer, int nid, const std::string& value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  const ExtensionPtr extension(X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
  return extension && X509_add_ext(certificate, extension.get(), -1) == 1;
}

// A certificate of `key` that is not signed yet; of itself when there is no issuer.
CertificatePtr draft(EVP_PKEY* key, const std::string& name, X509* issuer, std::chrono::seconds begins,
                     std::chrono::seconds valid) {
  CertificatePtr certificate(X509_new());
  X509_set_version(certificate.get(), 2);
  std::uint64_t serial = 0;
  RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial);
  ASN1_INTEGER_set_uint64(X509_get_serialNumber(certificate.get()), serial >> 1 | 1);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), begins.count());
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), (begins + valid).count());
  X509_set_pubkey(certificate.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate.get()), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(issuer == nullptr ? certificate.get() : issuer));
  return certificate;
}

Status failed(const char* what) {
  const char* reason = ERR_reason_error_string(ERR_get_error());
  ERR_clear_error();
  return Status(Code::kInvalidArgument, std::string(what) + ": " + (reason == nullptr ? "is not allowed" : reason));
}

}  // namespace

Result<KeyPair> make_authority(const std::string& name, std::chrono::seconds valid) {
  ERR_clear_error();
  const KeyPtr key(EVP_EC_gen("P-256"));
  if (!key) return failed("key");
  const CertificatePtr certificate = draft(key.get(), name, nullptr, std::chrono::seconds(-60), valid);
  if (!add_extension(certificate.get(), certificate.get(), NID_basic_constraints, "critical,CA:TRUE,pathlen:0") ||
      !add_extension(certificate.get(), certificate.get(), NID_key_usage, "critical,keyCertSign,cRLSign") ||
      !add_extension(certificate.get(), certificate.get(), NID_subject_key_identifier, "hash") ||
      X509_sign(certificate.get(), key.get(), EVP_sha256()) == 0) {
    return failed("authority");
  }
  return pair_of(certificate.get(), key.get());
}

Result<KeyPair> sign_certificate(const KeyPair& authority, const std::string& name, const std::string& names,
                                 std::chrono::seconds begins, std::chrono::seconds valid) {
  ERR_clear_error();
  const BioPtr certificate_text(
      BIO_new_mem_buf(authority.certificate.data(), static_cast<int>(authority.certificate.size())));
  const CertificatePtr issuer(PEM_read_bio_X509(certificate_text.get(), nullptr, nullptr, nullptr));
  const BioPtr key_text(BIO_new_mem_buf(authority.key.data(), static_cast<int>(authority.key.size())));
  const KeyPtr issuer_key(PEM_read_bio_PrivateKey(key_text.get(), nullptr, nullptr, nullptr));
  if (!issuer || !issuer_key || X509_check_private_key(issuer.get(), issuer_key.get()) != 1) return failed("authority");
  const KeyPtr key(EVP_EC_gen("P-256"));
  if (!key) return failed("key");
  const CertificatePtr certificate = draft(key.get(), name, issuer.get(), begins, valid);
  if (!add_extension(certificate.get(), issuer.get(), NID_subject_alt_name, names)) return failed("names");
  if (!add_extension(certificate.get(), issuer.get(), NID_basic_constraints, "critical,CA:FALSE") ||
      !add_extension(certificate.get(), issuer.get(), NID_ext_key_usage, "serverAuth,clientAuth") ||
      !add_extension(certificate.get(), issuer.get(), NID_authority_key_identifier, "keyid") ||
      X509_sign(certificate.get(), issuer_key.get(), EVP_sha256()) == 0) {
    return failed("certificate");
  }
  return pair_of(certificate.get(), key.get());
}

Result<CertificateFacts> facts_of(const std::string& certificate) {
  ERR_clear_error();
  const BioPtr text(BIO_new_mem_buf(certificate.data(), static_cast<int>(certificate.size())));
  const CertificatePtr parsed(PEM_read_bio_X509(text.get(), nullptr, nullptr, nullptr));
  if (!parsed) return failed("certificate");
  const auto printed = [](auto print) {
    const BioPtr out(BIO_new(BIO_s_mem()));
    print(out.get());
    return text_of(out.get());
  };
  int names = 0;
  if (auto* found = static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(parsed.get(), NID_subject_alt_name, nullptr, nullptr));
      found != nullptr) {
    names = sk_GENERAL_NAME_num(found);
    GENERAL_NAMES_free(found);
  }
  return CertificateFacts{.begins = printed([&](BIO* out) { ASN1_TIME_print(out, X509_get0_notBefore(parsed.get())); }),
                          .ends = printed([&](BIO* out) { ASN1_TIME_print(out, X509_get0_notAfter(parsed.get())); }),
                          .subject = printed([&](BIO* out) {
                            X509_NAME_print_ex(out, X509_get_subject_name(parsed.get()), 0, XN_FLAG_ONELINE);
                          }),
                          .names = names};
}

Status nameless_certificate() {
  return {Code::kInvalidArgument,
          "certificate: it names no host in subjectAltName; allowed: one with the names that clients dial"};
}

}  // namespace sparserow::rpc
