"""The transaction buffer: changes of open transactions in, whole committed transactions out.

It knows nothing of Postgres: any log that mixes transactions which will commit with ones which will not can feed it.

    places    which places of a transaction were rolled back
    spool     files that hold transactions too large for memory
    buffer    memory budget, savepoints, commits and aborts
"""
