"""Reading tables as of a database snapshot, without Spark: for its workers, and for the capture.

copy_range    one ctid range under an imported snapshot, as columns
ctid_ranges   parts of a table by ctid, and what is missing beside others
table_ranges  a table as of the snapshot, and its cut into ranges
lock_watch    who waits for a reader's lock gets it
"""
