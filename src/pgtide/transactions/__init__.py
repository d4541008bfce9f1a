"""The transaction buffer: changes of open transactions in, whole committed transactions out.

It knows nothing of Postgres: any log that mixes transactions which will commit with ones which will not can feed it.

    places       which places of a transaction were rolled back
    row_ids      which row each place changed, for sources that undo by naming rows
    pieces       a transaction's rows as the log takes them
    spool        files that hold transactions too large for memory
    pending      one transaction whose end is not known
    prepared     transactions that wait for their end across restarts
    buffer       memory budget, savepoints, commits and aborts; the source sends again what was open
    persistent   the same for sources that cannot send again: what is open survives with the read position

docs/guides/writing-a-connector.md is the contract for whoever feeds it.
"""
