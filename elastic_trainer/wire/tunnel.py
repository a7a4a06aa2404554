"""A command's stdin, stdout and stderr over an encrypted connection to a host's agent.

    python own.py elastic_trainer.wire.tunnel HOST:PORT KEY_FILE [ARGUMENT …]

driver, supervisor, doctor (driver/reach.py, in place of ssh) → here → agent.py → here, in
discovery/far_side.py → host/remote.py, with these arguments

What always holds:
1. The agent accepts a request that is signed with the agents' key, once (seal.py, agent.py). Only
   then a process on the host reads more of that connection.
2. All that follows is under TLS: the environment of a worker has secrets, and other users of the
   network may listen. Both ends then sign the channel (tls-unique, RFC 5929) with the key, so each
   knows that the other end has the key and that nobody is between them. Before that the host starts
   nothing, and this end sends nothing.
3. The key is in a file and in the memory of both ends. It never travels.
4. The exit code here is that of the command there. It is 255 if the connection ended before, as
   ssh's is.
5. A connection over which nothing comes any more ends within DEAD_S, at both ends.

TLS has an anonymous key exchange, with new keys for each connection: what was recorded stays secret
when the agents' key becomes known. There is no certificate, because only a package could make one.

Source: RFC 5246, RFC 5929 (3.1, with RFC 7627, which OpenSSL uses by default), RFC 7919
(ffdhe3072).
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import ssl
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

from elastic_trainer.wire.plain import plain_text
from elastic_trainer.wire.seal import NONCE, SIGNATURE, Kind, is_sealed, seal

REQUEST = b"POST /run"
SWITCHING = b"HTTP/1.1 101 Switching Protocols\r\n\r\n"
REFUSED, STARTS_NONE = 403, 501
"""The agent's other answers: the signature is wrong; it was started without --starts-workers."""
CONNECT_S = 5.0
HANDSHAKE_S = 10.0
"""The time of all that comes before the first frame. A host that boots is slow."""
DEAD_S = 8
"""The time after which a connection without any sign of the other end is given up (tcp(7))."""
LOST = 255
CIPHER = "ADH-AES256-GCM-SHA384"
GROUP = """-----BEGIN DH PARAMETERS-----
MIIBiAKCAYEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEfz9zeNVs7ZRkDW7w09N75nAI4YbRvydbmyQd62R0mkff3
7lmMsPrBhtkcrv4TCYUTknC0EwyTvEN5RPT9RFLi103TZPLiHnH1S/9croKrnJ32
nuhtK8UiNjoNq8Uhl5sN6todv5pC1cRITgq80Gv6U93vPBsg7j/VnXwl5B0rZsYu
N///////////AgEC
-----END DH PARAMETERS-----
"""
"""ffdhe3072 (RFC 7919): `openssl genpkey -genparam -algorithm DH -pkeyopt group:ffdhe3072`."""
ARGUMENTS, INPUT, OUTPUT, ERRORS, EXIT = b"a", b"i", b"o", b"e", b"x"
"""The kinds of frames. An empty INPUT is the end of the input."""
HEAD = struct.Struct("!cI")
MOST_FRAME = 1 << 20
MOST_WAITING = 1 << 20
"""No more is read from a command while this number of bytes waits for the connection."""
CHUNK = 1 << 16
WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class NotReached(ConnectionError):
    """The agent was not reached, or is not one of this key's, or refuses to start anything."""


def context(*, is_host: bool) -> ssl.SSLContext:
    """Return the settings of TLS. Raises NotReached where this machine's OpenSSL forbids them."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_host else ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # the key proves both ends
    tls.minimum_version = tls.maximum_version = ssl.TLSVersion.TLSv1_2  # 1.3 has no anonymous one
    tls.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    try:
        tls.set_ciphers(f"{CIPHER}:@SECLEVEL=0")  # the level counts certificates, and there is none
    except ssl.SSLError as error:
        raise NotReached(f"{ssl.OPENSSL_VERSION} of {sys.executable} does not offer {CIPHER}, by "
                         f"which agents start workers (a FIPS policy forbids it). Use --reach "
                         f"ssh.") from error
    if is_host:
        descriptor = os.memfd_create("group")  # a pod may have no disk that can be written
        os.write(descriptor, GROUP.encode())
        tls.load_dh_params(f"/proc/self/fd/{descriptor}")
        os.close(descriptor)
    return tls


class Channel:
    """Frames in both directions, on a connection whose two ends have proved that they have the key.

    For one thread. `end` closes it.
    """

    def __init__(self, connection: socket.socket, key: bytes, nonce: str, *, is_host: bool):
        """Shake hands. Raises OSError, NotReached."""
        connection.settimeout(HANDSHAKE_S)
        for option, value in ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2),
                              (socket.TCP_KEEPCNT, 3), (socket.TCP_NODELAY, 1),
                              (socket.TCP_USER_TIMEOUT, 1000 * DEAD_S)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.tls = context(is_host=is_host).wrap_socket(connection, server_side=is_host)
        parts = nonce.encode(), self.tls.get_channel_binding("tls-unique") or b""
        ours, theirs = ((Kind.HOST_END, Kind.DRIVER_END) if is_host
                        else (Kind.DRIVER_END, Kind.HOST_END))
        if not is_host:
            self.tls.sendall(seal(key, ours, *parts).encode())
        given = self._exactly(2 * 32).decode(errors="replace")
        if not parts[1] or not is_sealed(given, key, theirs, *parts):
            raise NotReached("The other end of the connection does not have the agents' key.")
        if is_host:
            self.tls.sendall(seal(key, ours, *parts).encode())
        self.tls.setblocking(False)
        self.outgoing, self.received, self.is_open = bytearray(), bytearray(), True

    def _exactly(self, count: int) -> bytes:
        received = b""
        while len(received) < count:
            if not (more := self.tls.recv(count - len(received))):
                raise NotReached("The other end of the connection has closed it. It does not have "
                                 "the agents' key.")
            received += more
        return received

    def fileno(self) -> int:
        """Return the descriptor, for select."""
        return self.tls.fileno()

    def send(self, kind: bytes, data: bytes = b"") -> None:
        """Send a frame, as soon as the connection takes it."""
        self.outgoing += HEAD.pack(kind, len(data)) + data
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the connection takes it."""
        try:
            while self.outgoing and self.is_open:
                del self.outgoing[:self.tls.send(self.outgoing[:CHUNK])]
        except WAITS:
            pass
        except OSError:
            self.is_open = False

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the frames that have arrived. `is_open` is false after the end."""
        try:
            while data := self.tls.recv(CHUNK):
                self.received += data
            self.is_open = False
        except WAITS:
            pass
        except OSError:
            self.is_open = False
        while (length := self._whole()) is not None:
            frame = bytes(self.received[:HEAD.size + length])
            del self.received[:HEAD.size + length]
            yield frame[:1], frame[HEAD.size:]

    def _whole(self) -> int | None:
        """Return the length of the next frame if it has arrived. One that is too long ends all."""
        if len(self.received) < HEAD.size:
            return None
        length: int = HEAD.unpack_from(self.received)[1]
        self.is_open = self.is_open and length <= MOST_FRAME
        return length if length <= MOST_FRAME and len(self.received) >= HEAD.size + length else None

    def wait(self, streams: dict[int, bytes], *more: int,
             limit_s: float | None = None) -> tuple[list[int], bool]:
        """Wait for the connection, for `streams` (unless too much waits to be sent) and `more`.

        Returns which of these descriptors can be read, and whether the connection can.
        """
        open_streams = list(streams) if len(self.outgoing) < MOST_WAITING else []
        reads = [*open_streams, *more, *([self.fileno()] if self.is_open else [])]
        writes = [self.fileno()] if self.outgoing and self.is_open else []
        has_frame = self._whole() is not None  # the caller has left `frames` before its end
        ready, writable, _ = select.select(reads, writes, [], 0.0 if has_frame else limit_s)
        if writable:
            self.flush()
        is_heard = has_frame or (self.is_open and self.fileno() in ready)
        return [one for one in ready if one != self.fileno()], is_heard

    def pass_on(self, streams: dict[int, bytes], ready: list[int]) -> None:
        """Read each ready stream once, and send it as a frame. One that has ended is forgotten."""
        for descriptor in [one for one in ready if one in streams]:
            try:
                data = os.read(descriptor, CHUNK)
            except OSError:
                data = b""
            if data or streams[descriptor] == INPUT:
                self.send(streams[descriptor], data)
            if not data:
                del streams[descriptor]

    def end(self) -> None:
        """Send what waits, and close when the other end has read it."""
        with suppress(OSError):
            self.tls.settimeout(CONNECT_S)
            while self.outgoing and self.is_open:
                del self.outgoing[:self.tls.send(self.outgoing[:CHUNK])]
            self.tls.shutdown(socket.SHUT_WR)
            while self.tls.recv(CHUNK):  # bytes that nobody has read would make a reset of the end
                pass
        self.tls.close()


def request_parts(nonce: str, agent: str) -> tuple[bytes, ...]:
    """Return the parts that the signature of a start request covers: nonce, agent's IP address,
    request. Without the address another agent would accept a copy of it."""
    return nonce.encode(), agent.encode(), REQUEST


def why_not(status: int) -> str:
    """Return why an agent has answered so, with the remedy."""
    if status == STARTS_NONE:
        return "It starts no workers. Start it with --starts-workers."
    if status == REFUSED:
        return ("It has another key, or it is reached through NAT. Give it the file of "
                "--agent-key-file as its --key-file, and the hosts file an address of its machine.")
    return (f"It answered {status or 'nothing'}. Start the agent with --starts-workers there, or "
            f"give its port (--agent-port).")


def reach(address: str, key: bytes) -> Channel:
    """Open a channel to the agent at host:port. Raises NotReached, OSError."""
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_S)
    except OSError as error:
        raise NotReached(f"It is not reached: {error.strerror or error}. Start the agent with "
                         f"--starts-workers there, or give its port (--agent-port).") from error
    connection.settimeout(HANDSHAKE_S)
    nonce = secrets.token_hex(8)
    signature = seal(key, Kind.START, *request_parts(nonce, connection.getpeername()[0]))
    lines = [f"{REQUEST.decode()} HTTP/1.1", "Content-Length: 0", f"{NONCE}: {nonce}",
             f"{SIGNATURE}: {signature}", "", ""]
    connection.sendall("\r\n".join(lines).encode())
    answer = b""
    while len(answer) < len(SWITCHING) and (more := connection.recv(len(SWITCHING) - len(answer))):
        answer += more
    if answer != SWITCHING:
        words = answer.split()
        is_http = len(words) > 1 and words[1].isdigit()
        raise NotReached(why_not(int(words[1]) if is_http else 0))
    return Channel(connection, key, nonce, is_host=False)


def carry(channel: Channel) -> int:
    """Carry this process's stdin, stdout and stderr; returns the command's exit code."""
    streams = {0: INPUT}
    while channel.is_open:
        ready, is_heard = channel.wait(streams)
        channel.pass_on(streams, ready)
        for kind, data in channel.frames() if is_heard else ():
            if kind == EXIT:
                return data[0] if len(data) == 1 else LOST
            if kind in (OUTPUT, ERRORS):
                with suppress(OSError):  # nobody reads it: the driver has ended
                    write_all(1 if kind == OUTPUT else 2, data)
    return LOST


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest):]


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    address, key_file, *arguments = argv
    try:
        with open(key_file, "rb") as file:
            key = file.read().strip()
        channel = reach(address, key)
        channel.send(ARGUMENTS, json.dumps(arguments).encode())
        code = carry(channel)
        if code == LOST:
            raise NotReached("The connection has ended.")
        return code
    except (OSError, ValueError) as error:
        print(f"elastic-trainer: The agent at {address}: {plain_text(str(error))}", file=sys.stderr)
        return LOST


if __name__ == "__main__":
    # Without the interpreter's end, which would wait for nothing.
    code_of_command = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code_of_command)
