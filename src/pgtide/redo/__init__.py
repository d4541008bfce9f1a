"""Redo logs in the shape of Oracle's LogMiner, from recorded files into the change log.

A source unlike Postgres: it mixes transactions that will commit with ones that will not, names no savepoints but lists
the rows that a rollback undoes, and removes its files in time, so that what was read cannot be read again.

    records      what a redo log says: start, insert, update, delete, commit, rollback; and undo records
    files        recorded files: lines of JSON, rolled by size
    dictionary   tables as the redo log describes them, and their values
    reader       files → transaction buffer → change log, and the position back
    generator    random histories as records, with what should come out
"""
