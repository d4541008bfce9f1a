"""The log on an object store, where nothing can be appended to and every request costs milliseconds.

names      an object per flush, named by its first offset alone; merged objects are named by what they cover
marker     how far the log may be read: one object, replaced only by whoever has seen its last version
writer     creates the next object, then moves the marker
layout     which objects count, and for what
merge      many small objects into one, beside the writer

Why a writer that was thought dead can do no harm: docs/decisions/0007-object-stores.md.
"""
