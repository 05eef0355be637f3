# Runs Bash code for the host, cell by cell; see frame.rs. $1 is the mark, $2 the mode (`kernel`, `once`), $3 is `again` when
# this shell takes over from one that `exit`, `set -e` or an interrupt has ended: it then reads that one's state.
#
# Descriptors 247 (requests), 248 and 249 (messages) are this driver's, its names begin with `__exuvia_`.
__exuvia_mark=$'\x1e'$1:
__exuvia_word=$1
__exuvia_mode=$2
__exuvia_busy=

__exuvia_send() { printf '%s3%04x%s' "$__exuvia_mark" "${#2}" "$2" >&"$1"; }

__exuvia_end() {
    local ok=true interrupted=false
    [ "$1" = 0 ] || ok=false
    [ -z "$__exuvia_interrupted" ] || interrupted=true
    if [ $ok = false ]; then
        local error='{"name":"ExitStatus","value":"'$1'","traceback":""}'
        [ $interrupted = false ] || error='{"name":"Interrupted","value":"","traceback":""}'
        __exuvia_send 248 '{"error":'$error'}'
    fi
    __exuvia_send 249 '{"sync":'$__exuvia_number'}'
    __exuvia_send 248 '{"end":{"number":'$__exuvia_number',"ok":'$ok',"interrupted":'$interrupted',"status":'$1'}}'
}

__exuvia_state() {
    declare -p
    declare -f
    alias -p
    shopt -p
    set +o | grep -Ev ' (errexit|nounset|xtrace|verbose|noexec|history|monitor)$'
} 2>/dev/null

# The shell ends: in the middle of a cell that is the cell's end alone, and the state goes on in a new shell of this process.
__exuvia_exit() {
    { __exuvia_status=$? __exuvia_flags=$-; set +euxvn; } 2>/dev/null
    if [ -z "$__exuvia_busy" ]; then
        return
    fi
    __exuvia_busy=
    __exuvia_flags=${__exuvia_flags//[^euxv]/}
    eval "$__exuvia_before"
    if [ "$__exuvia_mode" = once ]; then
        __exuvia_end "$__exuvia_status"
        return
    fi
    exec 246< <(__exuvia_state)
    __exuvia_end "$__exuvia_status"
    shopt -u execfail
    exec "$BASH" --norc --noprofile -c "$BASH_EXECUTION_STRING" bash "$__exuvia_word" kernel again
}

__exuvia_int() {
    if [ -n "$__exuvia_busy" ]; then
        __exuvia_interrupted=yes
        exit 130
    fi
}

trap '' INT
trap __exuvia_exit EXIT
if [ "$3" = again ]; then
    IFS= read -r -d '' -u 246 __exuvia_was
    exec 246<&-
    set --
    eval "$__exuvia_was" 2>/dev/null
    unset __exuvia_was
else
    exec 247<&0 248>&1 249>&2 </dev/null
    set --
    __exuvia_flags=
    __exuvia_send 248 '{"ready":{"version":"'"$BASH_VERSION"'"}}'
fi

while IFS=' ' read -r -u 247 __exuvia_word_run __exuvia_number __exuvia_length __exuvia_more; do
    LC_ALL=C IFS= read -r -N "$__exuvia_length" -u 247 __exuvia_code || exit 3
    __exuvia_names=
    if [ "$__exuvia_more" != 0 ]; then
        LC_ALL=C IFS= read -r -N "$__exuvia_more" -u 247 __exuvia_names || exit 3
    fi
    __exuvia_before=
    eval "$__exuvia_names"
    __exuvia_interrupted=
    __exuvia_busy=yes
    trap __exuvia_int INT
    { [ -z "$__exuvia_flags" ] || set "-$__exuvia_flags"; } 2>/dev/null
    eval "$__exuvia_code"
    {
        __exuvia_status=$? __exuvia_flags=$-
        set +euxvn
        __exuvia_busy=
        trap '' INT
        __exuvia_flags=${__exuvia_flags//[^euxv]/}
    } 2>/dev/null
    [ -e /dev/fd/0 ] || exec </dev/null
    [ -e /dev/fd/1 ] || exec >&248
    [ -e /dev/fd/2 ] || exec 2>&249
    eval "$__exuvia_before"
    __exuvia_end "$__exuvia_status"
    [ "$__exuvia_mode" = kernel ] || exit "$__exuvia_status"
done
