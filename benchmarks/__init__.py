"""Timings, baselines, records and the tables made from them.

`python -m benchmarks.record --help` measures; `python -m benchmarks.tables` rewrites the README.
"""
