"""Spans of sampled operations: who asked, what each segment took, and files that Perfetto shows.

    context    the caller's trace, by W3C's traceparent
    spans      operations and their segments, the decision to sample, the memory that keeps them
    slow       the log line of an operation that took too long
    spool      what a process appends to its file, and what tells the processes of a host to begin and to end
    perfetto   trace events: made, read back and checked, merged
    summary    segments by operation: count, quantiles, share

``sdk/tracing/`` puts the spans into a client's calls, ``server/tracing/`` into what servers do for one.
docs/tracing.md is for operators. A client that does not trace loads none of this.
"""
