// The reference of `sparserow bench tls`: OpenSSL on a blocking socket, bytes from and to buffers that are used again.
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "rpc/transport/openssl_ptr.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

using RawContext = rpc::OpensslPtr<SSL_CTX, SSL_CTX_free>;
using RawSession = rpc::OpensslPtr<SSL, SSL_free>;
using RawHeader = std::array<std::int64_t, 2>;  // bytes of the request, this header among them, and of the reply

[[noreturn]] void fail_raw(const char* what) {
  std::array<char, 256> text{};
  ERR_error_string_n(ERR_get_error(), text.data(), text.size());
  throw std::runtime_error(std::string("raw TLS: ") + what + ": " + text.data());
}

// One end of a connection; the caller keeps the socket open. A client trusts every server.
class RawTls {
 public:
  RawTls(int fd, const std::string& certificate, const std::string& key, std::size_t largest_bytes)
      : context_(SSL_CTX_new(certificate.empty() ? TLS_client_method() : TLS_server_method())),
        outgoing_(largest_bytes, 1),
        incoming_(largest_bytes) {
    if (!certificate.empty()) show(certificate, key);
    session_.reset(SSL_new(context_.get()));
    if (!session_ || SSL_set_fd(session_.get(), fd) != 1) fail_raw("set up");
    const py::gil_scoped_release released;
    if ((certificate.empty() ? SSL_connect(session_.get()) : SSL_accept(session_.get())) != 1) fail_raw("handshake");
  }

  void exchange(std::int64_t request_bytes, std::int64_t reply_bytes) {
    const py::gil_scoped_release released;
    const RawHeader header{request_bytes, reply_bytes};
    if (request_bytes < static_cast<std::int64_t>(sizeof header))
      throw std::runtime_error("raw TLS: no room for lengths");
    std::memcpy(outgoing_.data(), header.data(), sizeof header);
    send(request_bytes);
    if (!receive(incoming_.data(), reply_bytes)) fail_raw("the other side has left");
  }

  // Answers until the other side leaves.
  void answer() {
    const py::gil_scoped_release released;
    RawHeader header{};
    while (receive(incoming_.data(), sizeof header)) {
      std::memcpy(header.data(), incoming_.data(), sizeof header);
      if (!receive(incoming_.data(), header[0] - static_cast<std::int64_t>(sizeof header))) return;
      send(header[1]);
    }
  }

 private:
  void show(const std::string& certificate, const std::string& key) {
    const rpc::BioPtr certificate_text(BIO_new_mem_buf(certificate.data(), static_cast<int>(certificate.size())));
    const rpc::BioPtr key_text(BIO_new_mem_buf(key.data(), static_cast<int>(key.size())));
    const rpc::CertificatePtr shown(PEM_read_bio_X509(certificate_text.get(), nullptr, nullptr, nullptr));
    const rpc::KeyPtr secret(PEM_read_bio_PrivateKey(key_text.get(), nullptr, nullptr, nullptr));
    if (!shown || !secret || SSL_CTX_use_certificate(context_.get(), shown.get()) != 1 ||
        SSL_CTX_use_PrivateKey(context_.get(), secret.get()) != 1) {
      fail_raw("certificate or key");
    }
  }

  void send(std::int64_t bytes) {
    std::size_t sent = 0;
    if (bytes > 0 && SSL_write_ex(session_.get(), outgoing_.data(), static_cast<std::size_t>(bytes), &sent) != 1) {
      fail_raw("send");
    }
  }

  bool receive(char* into, std::int64_t bytes) {
    while (bytes > 0) {
      std::size_t got = 0;
      if (SSL_read_ex(session_.get(), into, static_cast<std::size_t>(bytes), &got) != 1) return false;
      into += got;
      bytes -= static_cast<std::int64_t>(got);
    }
    return true;
  }

  RawContext context_;
  RawSession session_;
  std::vector<char> outgoing_;
  std::vector<char> incoming_;
};

}  // namespace

void bind_raw_tls(py::module_& module) {
  py::class_<RawTls>(module, "RawTls")
      .def(py::init<int, const std::string&, const std::string&, std::size_t>(), py::arg("fd"), py::kw_only(),
           py::arg("certificate") = "", py::arg("key") = "", py::arg("largest_bytes"))
      .def("exchange", &RawTls::exchange, py::arg("request_bytes"), py::arg("reply_bytes"))
      .def("answer", &RawTls::answer);
}

}  // namespace sparserow::bindings
