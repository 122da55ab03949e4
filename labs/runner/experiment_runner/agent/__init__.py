"""The supervisor on the target: sent there as one file, it needs nothing but Python 3.9.

It is the only thing of the runner that touches the target: it unpacks what is sent, runs the steps, and reads the log
and the results out. The process that runs the steps belongs to no connection: it enforces the limits, writes
`status.json` and `log.txt`, and waits some time for the results to be fetched. Its modules import each other
relatively, because there the package is called `agent`.
"""
