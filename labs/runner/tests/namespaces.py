"""Hosts on this machine that have nothing in common but a cable: each is a network namespace with an address of its
own, and with OpenSSH's server, which is started for each connection as inetd would. Nobody outside sees any of it.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from fakepod import CHEAP_ENCRYPTION, SSHD

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
NAMES = ("gpu-a", "gpu-b")
ADDRESSES = dict(zip(NAMES, ("10.77.0.1", "10.77.0.2"), strict=True))
CLIENT = """\
Host {name}
    HostName {address}
    ProxyCommand {ip} netns exec {namespace} {sshd} -i -f {folder}/sshd_config 2>>{folder}/log
    User {user}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
"""
SERVER = (
    CHEAP_ENCRYPTION
    + """\
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""
)


def why_impossible() -> str:
    """Why there can be no such hosts here; empty if there can."""
    if SSHD is None:
        return "needs OpenSSH's server: apt-get install openssh-server"
    if IP is None or os.geteuid() != 0:
        return "needs root and iproute2, to make network namespaces"
    name = f"lab-{uuid.uuid4().hex[:8]}"
    made = subprocess.run([IP, "netns", "add", name], capture_output=True, encoding="utf-8", check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run([IP, "netns", "delete", name], check=True)
    return ""


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Path]:
    """gpu-a and gpu-b, joined by a cable. Gives the SSH configuration with which they have these names."""
    folder.mkdir()
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(SERVER.format(folder=folder))
    (folder / "known_hosts").write_text(f"{','.join(ADDRESSES.values())} {(folder / 'host_key.pub').read_text()}")
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    spaces = {name: f"lab-{uuid.uuid4().hex[:8]}" for name in NAMES}
    described = [
        CLIENT.format(
            name=name, address=ADDRESSES[name], ip=IP, namespace=spaces[name], sshd=SSHD, folder=folder,
            user=getpass.getuser(),
        )
        for name in NAMES
    ]  # fmt: skip
    (folder / "config").write_text("".join(described))
    try:
        for space in spaces.values():
            run("netns", "add", space)
        first, second = spaces.values()
        run("-n", first, "link", "add", "cable0", "type", "veth", "peer", "name", "cable0", "netns", second)
        for name, space in spaces.items():
            run("-n", space, "address", "add", f"{ADDRESSES[name]}/24", "dev", "cable0")
            for link in ("lo", "cable0"):
                run("-n", space, "link", "set", link, "up")
        yield folder / "config"
    finally:
        for space in spaces.values():
            subprocess.run([str(IP), "netns", "delete", space], capture_output=True, check=False)


def run(*words: str) -> None:
    subprocess.run([str(IP), *words], check=True)
