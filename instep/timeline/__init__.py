"""Where the time of a training run went: traces, breakdown, straggler, advice, report, charts."""
