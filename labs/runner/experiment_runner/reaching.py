"""Whether several hosts can do a job together: asked of all of them before anything is made on any."""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor

from experiment_runner.errors import RunnerError
from experiment_runner.job import Node
from experiment_runner.providers.base import NotCreated
from experiment_runner.providers.host import Host

ANSWER_S = 30.0
QUESTION = """
import socket, sys
master, port, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if sys.version_info < (3, 9):
    sys.exit("its Python is %s, and 3.9 is needed" % sys.version.split()[0])
try:
    family, kind, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_STREAM)[0]
except OSError:
    sys.exit("does not know the name %s: set `master` to an address of the first machine" % master)
if rank == 0:
    server = socket.socket(family, kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
    except OSError as error:
        sys.exit("cannot listen at %s, port %d: %s; set `master` or `master_port`" % (master, port, error.strerror))
"""


def need_all(hosts: list[tuple[str, Host, Node]]) -> None:
    """Raises NotCreated, with the reason of each, if not all of these answer, have a Python, and know the first one."""
    with ThreadPoolExecutor(len(hosts)) as asking:
        answers = list(asking.map(lambda one: why_not(one[1], one[2]), hosts))
    wrong = [f"{name}: {why}" for (name, _, _), why in zip(hosts, answers) if why]
    if wrong:
        raise NotCreated(f"{'; '.join(wrong)} (nothing was made on any machine)")


def why_not(host: Host, node: Node) -> str:
    """What is wrong with one; empty if nothing."""
    words = [host.session.python, "-c", QUESTION, node.master, str(node.port), str(node.rank)]
    try:
        host.session.run(shlex.join(words), timeout_s=ANSWER_S)
    except RunnerError as error:
        return str(error)
    return ""
