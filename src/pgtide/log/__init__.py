"""The change log: the durable, replayable sequence of changes, and the only interface between capture and readers.

block      what one flush made durable: a directory of transactions and tables, then one Arrow stream per table
segment    a file of blocks, named by its first offset and its writer's epoch
marker     how far the log is durable; readers go no further
presence   what the capture says of itself
writer     the one that appends; takes an epoch, recovers, then writes, fsyncs and marks
reader     plans and reads ranges of offsets; needs nothing but the folder
"""
