// OpenSSL's objects with an owner.
#pragma once

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>

namespace sparserow::rpc {

template <auto free>
struct OpensslFree {
  template <class T>
  void operator()(T* object) const noexcept {
    free(object);
  }
};
template <class T, auto free>
using OpensslPtr = std::unique_ptr<T, OpensslFree<free>>;

using BioPtr = OpensslPtr<BIO, BIO_free_all>;
using CertificatePtr = OpensslPtr<X509, X509_free>;
using KeyPtr = OpensslPtr<EVP_PKEY, EVP_PKEY_free>;

}  // namespace sparserow::rpc
