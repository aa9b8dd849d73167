"""Send a request until it is answered, refused, or its tries are used up.

Waits when a server says Retry-After, repeats a request that may succeed later (one that is told 429 for as long as
others are answered), and never repeats a refused one.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from pipeline.errors import EngineError, NonsenseError, RequestError
from pipeline.products.text.serving.addresses import authorize
from pipeline.products.text.serving.answers import read_refusal, read_retry_after

MAX_TRIES = 5
MAX_TIMEOUTS = 2  # a request that ran into the timeout twice will do so again
BASE_BACKOFF_S = 0.5
MAX_BACKOFF_S = 20.0
CONNECT_TIMEOUT_S = 10.0
_JITTER = random.Random()  # its own: what else draws in this process may have set a seed
# of 5xx, which proxies have their own of, a server means these two for good: it can't do what is asked
_REPEATABLE = frozenset({408, 425, 429, *range(500, 600)}) - {501, 505}


class Sender:
    """Sends requests over one pool of connections, which `open` makes and `close` ends."""

    def __init__(
        self,
        *,
        timeout_s: float,
        max_tries: int,
        max_refusals: int,
        check_alive: Callable[[], None],
        api_key: str | None,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        """Prepare; arguments as those of `Client`."""
        self._timeout_s = timeout_s
        self._max_tries, self._max_refusals = max_tries, max_refusals
        self._check_alive, self._sleep = check_alive, sleep
        self._headers = {"content-type": "application/json"} | authorize(api_key)
        self._num_answered: Counter[str] = Counter()  # by server

    async def open(self) -> None:
        """Make the pool; the event loop runs."""
        # `total` also ends an answer that never ends; who sends limits the connections
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=min(self._timeout_s, CONNECT_TIMEOUT_S))
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def send(
        self, method: str, server: str, path: str, content: bytes | None, decode: Callable[[bytes], Any]
    ) -> tuple[Any, float]:
        """Return the decoded answer and the seconds that its last try took.

        Args:
            method: of HTTP.
            server: its address, to which the path is added.
            path: with its leading slash.
            content: the body, JSON; None: no body.
            decode: reads the answer's body; NonsenseError from it is a failed try.

        Raises:
            RequestError: the server refused the request for good.
            EngineError: no answer after all tries, or the server is known to be dead.
        """
        url, problem, num_tries, num_timeouts, num_refusals = server + path, "", 0, 0, 0
        num_answered = self._num_answered[server]
        while True:
            wait = min(MAX_BACKOFF_S, BASE_BACKOFF_S * 2**num_tries) * _JITTER.uniform(0.5, 1.0)
            num_tries += 1
            start = time.perf_counter()
            try:
                async with self._http.request(
                    method, url, data=content, headers=self._headers, allow_redirects=False
                ) as response:
                    body = await response.read()
                if response.status == 200:
                    self._num_answered[server] += 1
                    return decode(body), time.perf_counter() - start
                problem = f"HTTP {response.status}: {read_refusal(body)}"
                if response.status not in _REPEATABLE:
                    raise RequestError(f"{url}: {problem}", status=response.status)
                wait = read_retry_after(response.headers.get("retry-after", "")) or wait
                if response.status == 429 and self._num_answered[server] > num_answered:  # it limits the rate of all
                    num_tries, num_answered = 1, self._num_answered[server]
            except aiohttp.ConnectionTimeoutError:
                num_timeouts, wait = num_timeouts + 1, 0.0
                problem = f"no connection within {min(self._timeout_s, CONNECT_TIMEOUT_S):g} s"
            except TimeoutError:
                num_timeouts, wait = num_timeouts + 1, 0.0  # it has had its time
                problem = f"no answer within {self._timeout_s:g} s, which is resources.request_timeout_s"
            except aiohttp.ClientConnectorError as error:
                num_refusals += 1
                problem = f"no connection: {error.os_error}"
            except aiohttp.ClientResponseError as error:
                problem = f"expected HTTP, got {' '.join(error.message.split())[:200]}"
            except aiohttp.ClientError as error:
                problem = f"expected an answer, got {' '.join(str(error).split())[:200]}"
            except NonsenseError as error:
                problem = str(error)
            self._check_alive()
            if num_timeouts >= MAX_TIMEOUTS or num_refusals >= self._max_refusals or num_tries == self._max_tries:
                break
            await self._sleep(wait)
        raise EngineError(f"{url}: {problem} (tried {num_tries} times)")
