"""A server that goes with the process that started it, however that ends.

It runs under a small shell process that reads from a pipe we hold: when we die, by whatever signal, the pipe closes,
and the shell ends the server and removes its folder.  A parent-death signal would be simpler, but it follows the
*thread* that started the server, is lost on a change of account, and removes nothing.
"""

from __future__ import annotations

# $1 is the folder to remove when orphaned, the rest is the server's command.  Lines on standard input are signals to
# send it.  The reader is a process of its own so that the shell can wait for the server, however that ends; it repeats
# its last signal because a server that has only just been forked does not listen to it yet.
GUARD = """
folder=$1; shift
exec 3<&0 </dev/null
"$@" 3<&- &
server=$!
{
    while read -r signal <&3; do kill -s "$signal" "$server"; done
    : > "$folder/orphaned"
    while kill -s QUIT "$server"; do sleep 0.2; done
} 2>/dev/null &
reader=$!
wait "$server"; status=$?
kill "$reader" 2>/dev/null
wait "$reader" 2>/dev/null
if [ -e "$folder/orphaned" ]; then rm -rf "$folder"; fi
exit "$status"
"""
