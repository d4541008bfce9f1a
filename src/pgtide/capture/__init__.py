"""The capture: the process that owns the slot and appends to the log.

assemble   decoded messages → whole transactions, in commit order
appender   the thread that makes them durable, whatever the disk does
start      first start, restart and what must hold before streaming
pipeline   socket → decoder → transactions → log, and the acknowledgement back
"""
