"""The capture: the process that owns the slot and appends to the log.

start      first start, restart and what must hold before streaming
pipeline   socket → decoder → transactions → log, and the acknowledgement back
whole      transactions that come whole, a column at a time
assemble   decoded messages → committed transactions, in commit order
attend     what the reading thread does besides: answer the server, say what goes on, look after the rest
appender   the thread that makes them durable, whatever the disk does
watch      slot and publication as they are meanwhile; the capture's metrics
keeper     keeps the database snapshot of a load alive
tidy       retention, now and then
"""
