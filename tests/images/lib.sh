# shellcheck shell=bash
# What `provide` and `engine` share.

say() { printf 'images: %s\n' "$*"; }

die() {
    printf 'images: %s\n' "$*" >&2
    exit 1
}

child=

# Runs a command for at most so many seconds. It runs in the background because bash acts on a
# signal while it waits, but not while a command is in the foreground.
limited() {
    local seconds=$1 status=0
    shift
    timeout --kill-after=10 "$seconds" "$@" &
    child=$!
    wait "$child" || status=$?
    child=
    return "$status"
}

# For the EXIT trap: no command of ours outlives us.
stop_child() {
    [ -n "$child" ] || return 0
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
}

trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

apt() {
    DEBIAN_FRONTEND=noninteractive limited 600 apt-get -qq \
        -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 \
        -o Acquire::Retries=2 -o DPkg::Lock::Timeout=120 "$@" </dev/null
}

can_apt() { [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; }

# Installs Debian packages; only where `can_apt`.
install_packages() {
    say "installing $* with apt-get"
    apt update >"$tmp/apt" 2>&1 && apt install -y --no-install-recommends "$@" >>"$tmp/apt" 2>&1 || {
        tail -n 20 "$tmp/apt" >&2
        die "apt-get could not install $*"
    }
}
