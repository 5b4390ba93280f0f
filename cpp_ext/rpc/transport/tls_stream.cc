#include "rpc/transport/tls_stream.h"

#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace sparserow::rpc {
namespace {

constexpr std::size_t kRecordBytes = 16u << 10;  // the largest record of TLS
constexpr std::size_t kSendAtOnce = 64u << 10;   // of records: a system call for each would cost more than its cipher
constexpr Transfer kWasDone{1, Transfer::Want::kNothing, 0};

using SslPtr = OpensslPtr<SSL, SSL_free>;

// Whether these may be the first bytes of a client: a record of a handshake, which begins with a ClientHello. Other
// bytes are refused before anything is made for them.
bool may_begin_handshake(std::span<const std::byte> bytes) {
  const auto at = [&](std::size_t index) { return std::to_integer<std::size_t>(bytes[index]); };
  if (at(0) != SSL3_RT_HANDSHAKE) return false;
  if (bytes.size() > 1 && at(1) != SSL3_VERSION_MAJOR) return false;
  if (bytes.size() > 4 && (at(3) << 8 | at(4)) > kRecordBytes) return false;
  return bytes.size() <= 5 || at(5) == SSL3_MT_CLIENT_HELLO;
}

const BIO_METHOD* method_of_stream();

// OpenSSL reads from the stream below and writes records into memory, which goes there many at a time.
class TlsStream final : public Stream {
 public:
  // host: the name that a client has dialled; a server has none.
  TlsStream(std::unique_ptr<Stream> under, SSL_CTX* context, const std::optional<std::string>& host)
      : under_(std::move(under)) {
    SSL_CTX_up_ref(context);
    context_.reset(context);
    if (!host) return;
    make_session();
    SSL_set_connect_state(ssl_.get());
    in6_addr address{};
    if (::inet_pton(AF_INET, host->c_str(), &address) == 1 || ::inet_pton(AF_INET6, host->c_str(), &address) == 1) {
      X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_.get()), host->c_str());
    } else {
      SSL_set_hostflags(ssl_.get(), X509_CHECK_FLAG_NEVER_CHECK_SUBJECT);  // a subject's name is no host (RFC 9525, 2)
      SSL_set1_host(ssl_.get(), host->c_str());
      SSL_set_tlsext_host_name(ssl_.get(), host->c_str());
    }
  }
  [[nodiscard]] int fd() const noexcept override { return under_->fd(); }

  [[nodiscard]] bool needs_handshake() const noexcept override {
    return !ended_ && (!ssl_ || SSL_in_init(ssl_.get()) == 1 || has_outgoing());
  }
  Transfer try_begin() noexcept override { return ssl_ ? kWasDone : take_first(); }
  Transfer try_handshake() noexcept override {
    if (const Transfer stopped = begin(); !ssl_) return stopped;
    ERR_clear_error();
    const int done = SSL_do_handshake(ssl_.get());
    const Transfer stopped = done == 1 ? kWasDone : stopped_by(done);
    const Transfer flushed = flush();  // the answer, or why it failed
    const bool is_over = stopped.ended() || !has_outgoing();
    return is_over ? stopped : flushed;
  }

  // Goes on until the pieces are full or nothing is left here and below.
  Transfer try_read(std::span<const iovec> into) noexcept override {
    if (const Transfer stopped = begin(); !ssl_) return stopped;
    ERR_clear_error();  // what another user of this thread has left; our own failures end the loop
    std::size_t total = 0;
    for (const iovec& piece : into) {
      std::size_t filled = 0;
      while (filled < piece.iov_len) {
        std::size_t count = 0;
        const int done =
            SSL_read_ex(ssl_.get(), static_cast<std::byte*>(piece.iov_base) + filled, piece.iov_len - filled, &count);
        if (done != 1) {
          const Transfer stopped = stopped_by(done);
          holds_part_only_ = stopped.want == Transfer::Want::kRead;
          const Transfer flushed = flush();  // the handshake's answer, or why it failed
          if (total + filled > 0) return {total + filled, Transfer::Want::kNothing, 0};
          const bool waits = stopped.want == Transfer::Want::kRead && flushed.want == Transfer::Want::kWrite;
          return waits && held_ == 0 ? flushed : stopped;
        }
        holds_part_only_ = false;
        filled += count;
      }
      total += filled;
    }
    return {total, Transfer::Want::kNothing, 0};
  }

  // Bytes count as moved when their records are out. Those that did not count must come again, as callers of try_write
  // give them: the first held_ of them are records already.
  Transfer try_write(std::span<const iovec> from) noexcept override {
    if (const Transfer stopped = begin(); !ssl_) return stopped;
    if (const Transfer flushed = flush(); has_outgoing()) return flushed;
    if (SSL_in_init(ssl_.get()) == 1) holds_part_only_ = false;  // a handshake reads to write
    ERR_clear_error();
    std::size_t total = std::exchange(held_, 0);
    std::size_t offset = 0;
    skip(from, offset, total);
    while (!from.empty()) {
      Transfer stopped;
      bool is_stopped = false;
      while (!from.empty() && !is_stopped && outgoing_.size() < kSendAtOnce) {
        const std::span<const std::byte> chunk = next_chunk(from, offset);
        std::size_t count = 0;
        const int done = SSL_write_ex(ssl_.get(), chunk.data(), chunk.size(), &count);
        is_stopped = done != 1;
        if (is_stopped) stopped = stopped_by(done);
        held_ += count;
        skip(from, offset, count);
      }
      const Transfer flushed = flush();
      if (!has_outgoing()) total += std::exchange(held_, 0);
      if (is_stopped || has_outgoing()) {
        if (total > 0) return {total, Transfer::Want::kNothing, 0};
        return has_outgoing() ? flushed : stopped;
      }
    }
    return {total, Transfer::Want::kNothing, 0};
  }

  void shutdown_write() noexcept override {
    ERR_clear_error();
    if (ssl_ && !ended_) SSL_shutdown(ssl_.get());
    ERR_clear_error();
    flush();  // best effort: what the socket takes now
    under_->shutdown_write();
  }
  void reset() noexcept override { under_->reset(); }
  [[nodiscard]] bool has_buffered() const noexcept override {
    return !ended_ && ssl_ && !holds_part_only_ && SSL_has_pending(ssl_.get()) == 1;
  }
  [[nodiscard]] std::string why(const Transfer& ended) const override {
    return reason_.empty() ? under_->why(ended) : "TLS: " + reason_;
  }

  // ---- What OpenSSL reads and writes.

  Transfer read_for_session(std::span<std::byte> into) noexcept {
    if (!first_.empty()) {
      const std::size_t count = std::min(into.size(), first_.size());
      std::memcpy(into.data(), first_.data(), count);
      first_.erase(first_.begin(), first_.begin() + static_cast<std::ptrdiff_t>(count));
      return {count, Transfer::Want::kNothing, 0};
    }
    const iovec piece{into.data(), into.size()};
    return under_->try_read(std::span(&piece, 1));
  }
  void write_for_session(std::span<const std::byte> records) {
    outgoing_.insert(outgoing_.end(), records.begin(), records.end());
  }

 private:
  void make_session() {
    ssl_.reset(SSL_new(context_.get()));
    BIO* bio = BIO_new(method_of_stream());
    BIO_set_data(bio, this);
    BIO_set_init(bio, 1);
    SSL_set_bio(ssl_.get(), bio, bio);  // owns it
  }

  // A server has no session until its peer sent bytes that could begin a handshake.
  Transfer begin() noexcept {
    if (ssl_) return {};
    if (const Transfer stopped = take_first(); stopped.bytes == 0) return stopped;
    make_session();
    SSL_set_accept_state(ssl_.get());
    return {};
  }

  // bytes > 0: there are enough, and they could begin a handshake.
  Transfer take_first() noexcept {
    if (ended_) return {0, Transfer::Want::kNothing, EPROTO};
    constexpr std::size_t kEnough = 6;
    while (first_.size() < kEnough) {
      std::array<std::byte, 1024> taken;
      const iovec piece{taken.data(), taken.size()};
      const Transfer moved = under_->try_read(std::span(&piece, 1));
      if (moved.bytes == 0) return moved;
      first_.insert(first_.end(), taken.begin(), taken.begin() + static_cast<std::ptrdiff_t>(moved.bytes));
      if (!may_begin_handshake(first_)) {
        ended_ = true;
        reason_ = kDoesNotSpeakIt;
        return {0, Transfer::Want::kNothing, EPROTO};
      }
    }
    return kWasDone;
  }

  [[nodiscard]] bool has_outgoing() const noexcept { return sent_ < outgoing_.size(); }

  // Sends records until none is left; else says what stopped it.
  Transfer flush() noexcept {
    while (has_outgoing()) {
      const iovec piece{outgoing_.data() + sent_, outgoing_.size() - sent_};
      const Transfer moved = under_->try_write(std::span(&piece, 1));
      if (moved.bytes == 0) return moved;
      sent_ += moved.bytes;
    }
    outgoing_.clear();
    sent_ = 0;
    return {};
  }

  static void skip(std::span<const iovec>& from, std::size_t& offset, std::size_t count) noexcept {
    while (!from.empty() && offset + count >= from[0].iov_len) {
      count -= from[0].iov_len - offset;
      offset = 0;
      from = from.subspan(1);
    }
    offset += count;
  }

  // The piece itself when it is large or the last, else pieces put together: a record for each would cost more.
  std::span<const std::byte> next_chunk(std::span<const iovec> from, std::size_t offset) {
    const auto* first = static_cast<const std::byte*>(from[0].iov_base) + offset;
    const std::size_t left = from[0].iov_len - offset;
    if (left >= kRecordBytes || from.size() == 1) return {first, std::min(left, kRecordBytes)};
    gathered_.clear();
    gathered_.reserve(kRecordBytes);
    for (const iovec& piece : from) {
      const std::size_t part = std::min(piece.iov_len - offset, kRecordBytes - gathered_.size());
      const auto* bytes = static_cast<const std::byte*>(piece.iov_base) + offset;
      gathered_.insert(gathered_.end(), bytes, bytes + part);
      offset = 0;
      if (gathered_.size() == kRecordBytes) break;
    }
    return gathered_;
  }

  Transfer stopped_by(int done) noexcept {
    const int below_error = errno;
    switch (SSL_get_error(ssl_.get(), done)) {
      case SSL_ERROR_WANT_READ:
        return {0, Transfer::Want::kRead, 0};
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
    reason_ = is_plain ? kDoesNotSpeakIt : last_tls_error();
    if (verified != X509_V_OK) reason_ += std::string(" (") + X509_verify_cert_error_string(verified) + ")";
  }

  static constexpr const char* kDoesNotSpeakIt = "the peer does not speak it";

  std::unique_ptr<Stream> under_;
  ContextPtr context_;
  SslPtr ssl_;
  std::vector<std::byte> first_;     // of a server: what the peer began with, until the session has read it
  std::vector<std::byte> outgoing_;  // records; those before sent_ are out
  std::size_t sent_ = 0;
  std::size_t held_ = 0;  // bytes of the caller's in outgoing_, which have not counted as moved
  std::vector<std::byte> gathered_;
  std::string reason_;
  bool holds_part_only_ = false;  // what SSL_has_pending counts is no whole record: nothing to read until more comes
  bool ended_ = false;
};

// ---- The stream as OpenSSL's BIO.

TlsStream& stream_of(BIO* bio) { return *static_cast<TlsStream*>(BIO_get_data(bio)); }

// The errno of the stream's end is kept for TlsStream::stopped_by.
int read_below(BIO* bio, char* into, int count) {
  const Transfer moved =
      stream_of(bio).read_for_session({reinterpret_cast<std::byte*>(into), static_cast<std::size_t>(count)});
  BIO_clear_retry_flags(bio);
  if (moved.bytes > 0) return static_cast<int>(moved.bytes);
  if (moved.want != Transfer::Want::kNothing) BIO_set_retry_read(bio);
  const bool is_end = moved.ended() && moved.error == 0;
  if (is_end) BIO_set_flags(bio, BIO_FLAGS_IN_EOF);
  errno = moved.error;
  return is_end ? 0 : -1;
}

int write_below(BIO* bio, const char* from, int count) {
  stream_of(bio).write_for_session({reinterpret_cast<const std::byte*>(from), static_cast<std::size_t>(count)});
  return count;
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

}  // namespace

std::unique_ptr<Stream> make_tls_stream(std::unique_ptr<Stream> under, SSL_CTX* context,
                                        const std::optional<std::string>& host) {
  return std::make_unique<TlsStream>(std::move(under), context, host);
}

std::string last_tls_error() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "no reason given" : reason;
}

}  // namespace sparserow::rpc
