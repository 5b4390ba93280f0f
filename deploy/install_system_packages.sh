#!/usr/bin/env bash
# Installs the named Debian packages that are missing; without root it says what to install.
# A compiler, Python headers or a venv module that exist outside of apt are accepted as they are.
set -euo pipefail

have() {
  case "$1" in
    g++) command -v g++ >/dev/null ;;
    libasio-dev) test -e /usr/include/asio.hpp ;;
    libxxhash-dev) test -e /usr/include/xxhash.h ;;
    librocksdb-dev) test -e /usr/include/rocksdb/db.h ;;
    chromium) command -v chromium >/dev/null || command -v google-chrome >/dev/null ;;
    chromium-driver) command -v chromedriver >/dev/null ;;
    clang) command -v clang++ >/dev/null ;;
    etcd-server) command -v etcd >/dev/null ;;
    doctest-dev) test -e /usr/include/doctest/doctest.h ;;
    python3-venv) python3 -c 'import ensurepip, venv' 2>/dev/null ;;
    python3-dev) test -e "$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ;;
    *) dpkg -s "$1" >/dev/null 2>&1 ;;
  esac
}

missing=()
for package in "$@"; do
  have "$package" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ]; then
  echo "sparserow: missing system packages; install them with: sudo apt-get install -y ${missing[*]}" >&2
  exit 1
fi
echo "sparserow: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q >/dev/null
apt-get install -y -q --no-install-recommends "${missing[@]}" >/dev/null
