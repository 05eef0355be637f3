#!/usr/bin/env bash
# A Docker engine for sandboxes, where none answers.
#
#   scripts/dockerd.sh start    asks the system for its own, else starts one; waits until it answers
#   scripts/dockerd.sh status   0 when an engine answers
#   scripts/dockerd.sh stop     ends the one that `start` started, by its pid file, and no other
#
# The one started here has no bridge and leaves the host's firewall alone: sandboxes have no network. It keeps running
# until `stop` or a reboot. Where `runsc` is there (scripts/runsc.sh) it knows it as a runtime, which the backend `docker` uses for
# isolation `gvisor`; an engine of ours that runs without it, or with other options, is told of it.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

pid_file=$state/dockerd.pid
log=$state/dockerd.log
config=$state/dockerd.json
socket=${DOCKER_HOST:-unix:///var/run/docker.sock}
socket=${socket#unix://}

answers() { [ -S "$socket" ] && DOCKER_HOST=unix://$socket timeout 10 docker version >/dev/null 2>&1; }

# The pid in our file, if it is still a dockerd.
ours() {
    local pid
    pid=$(cat "$pid_file" 2>/dev/null) || return 1
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = dockerd ] && echo "$pid"
}

wait_for() {
    local tries=$1
    shift
    while ! "$@"; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || return 1
        sleep 0.2
    done
}

# runsc with a network refuses to start on recent kernels; without one it runs, in containers without one. Without `directfs`
# its kernel is nobody on the host. The backend looks for these options.
runtimes() {
    local runsc
    printf '{}\n' >"$config"
    runsc=$(bash "$(dirname "$0")/runsc.sh" path) || return 0
    printf '{"runtimes":{"runsc":{"path":"%s","runtimeArgs":[%s]}}}\n' "$runsc" \
        '"--platform=systrap","--network=none","--host-uds=none","--net-raw=false","--directfs=false","--overlay2=none"' >"$config"
}

# An engine reads its runtimes again at SIGHUP.
refresh() {
    local pid before
    pid=$(ours) || return 0
    before=$(cat "$config" 2>/dev/null || true)
    runtimes
    [ "$before" = "$(cat "$config")" ] || kill -HUP "$pid"
}

start() {
    if answers; then
        refresh
        return
    fi
    case $socket in
    *://*) die "DOCKER_HOST is $socket, and no engine answers there" ;;
    esac
    if [ -d /run/systemd/system ] && [ "$socket" = /var/run/docker.sock ]; then
        systemctl start docker || true
        wait_for 50 answers && return
    fi
    mkdir -p "$state"
    chmod 700 "$state"
    runtimes
    # No descriptor of ours may stay open in it: a caller that reads our output would wait for ever.
    setsid dockerd --config-file "$config" --host "unix://$socket" --pidfile "$pid_file" --bridge=none --iptables=false --ip6tables=false \
        </dev/null >>"$log" 2>&1 9>&- &
    if ! wait_for 300 answers; then
        tail -n 20 "$log" >&2
        die "dockerd did not come up; its whole log is $log"
    fi
    say "started a Docker engine (log: $log); it keeps running, \`make stop\` ends it"
}

stop() {
    local pid
    if ! pid=$(ours); then
        say "no Docker engine of ours runs"
        return
    fi
    kill "$pid"
    gone() { ! ours >/dev/null; }
    wait_for 150 gone || die "dockerd ($pid) does not end; its log is $log"
    say "ended the Docker engine that was started here"
}

case ${1:-} in
start) start ;;
stop) stop ;;
status) answers ;;
*) die "usage: $0 start|status|stop" ;;
esac
