// Certificates for a cluster that has no authority of its own: an authority, and what it signs. P-256 keys, in PEM.
#pragma once

#include <chrono>
#include <string>

#include "util/status.h"

namespace sparserow::rpc {

struct KeyPair {
  std::string certificate;
  std::string key;
};

// Signs itself; may sign others.
Result<KeyPair> make_authority(const std::string& name, std::chrono::seconds valid);

// Signs a certificate for servers and clients alike. `names` is as OpenSSL writes it, such as
// "DNS:ps-0.ps,IP:10.0.0.1". It is valid from `begins` after now. kInvalidArgument names what is at fault.
Result<KeyPair> sign_certificate(const KeyPair& authority, const std::string& name, const std::string& names,
                                 std::chrono::seconds begins, std::chrono::seconds valid);

struct CertificateFacts {
  std::string begins;  // as OpenSSL prints a time
  std::string ends;
  std::string subject;
  int names = 0;  // of hosts, in subjectAltName
};
// Reads the first certificate of a text. kInvalidArgument when there is none.
Result<CertificateFacts> facts_of(const std::string& certificate);
// The error for a server's certificate that names no host there: clients would have to trust its subject.
[[nodiscard]] Status nameless_certificate();

}  // namespace sparserow::rpc
