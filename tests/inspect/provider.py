"""Inspect's sandbox interface (`inspect_ai.util.SandboxEnvironment`) over Exuvia's gRPC SandboxService.

For the conformance checks in `test_self_check.py`. Written against the public proto alone, as any client would be.
"""

from __future__ import annotations

import os
import sys
from typing import Any, AsyncIterator

import grpc
from google.rpc import error_details_pb2, status_pb2
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
)

# The modules that grpc_tools generates name each other from their own root.
sys.path.insert(0, os.environ["EXUVIA_STUBS"])
from exuvia.v1 import sandbox_pb2 as pb  # noqa: E402
from exuvia.v1 import sandbox_pb2_grpc as rpc  # noqa: E402

CHUNK = 1 << 20
CAUSE = pb.ExecEnded


class Exuvia(SandboxEnvironment):
    def __init__(self, stub: rpc.SandboxServiceStub, sandbox_id: str):
        super().__init__()
        self.stub = stub
        self.id = sandbox_id

    @classmethod
    async def create(cls, channel: grpc.aio.Channel, **request: Any) -> "Exuvia":
        stub = rpc.SandboxServiceStub(channel)
        made = await stub.Create(pb.CreateSandboxRequest(by="inspect", **request))
        return cls(stub, made.sandbox_id)

    async def kill(self) -> None:
        await self.stub.Kill(pb.KillRequest(sandbox_id=self.id, by="inspect"))

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        start = pb.ExecStart(
            sandbox_id=self.id,
            argv=[os.fsencode(word) for word in cmd],
            env=env or {},
            cwd=os.fsencode(cwd or ""),
            stdin=input is not None,
            user=user or "",
            by="inspect",
        )
        if timeout is not None:
            start.timeout.FromSeconds(timeout)
        call = self.stub.Exec(self._input(start, input))
        out, err, ended = bytearray(), bytearray(), None
        try:
            async for event in call:
                kind = event.WhichOneof("kind")
                if kind == "stdout":
                    out += event.stdout.data
                elif kind == "stderr":
                    err += event.stderr.data
                elif kind == "ended":
                    ended = event.ended
        except grpc.aio.AioRpcError as error:
            return self._not_started(error, cmd, user)
        assert ended is not None, "the stream ended without its last message"
        for stream in (out, err):
            if len(stream) > SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, None)
        if ended.cause == CAUSE.TIMED_OUT:
            raise TimeoutError(f"timed out after {ended.limit} ms")
        code = 128 + ended.signal if ended.HasField("signal") else ended.exit_code
        if ended.cause not in (CAUSE.EXITED, CAUSE.SIGNALLED):
            raise ConnectionError(f"{CAUSE.Cause.Name(ended.cause)}: {ended.reason}")
        text = [bytes(stream).decode("utf-8", "replace") for stream in (out, err)]
        return ExecResult(success=code == 0, returncode=code, stdout=text[0], stderr=text[1])

    @staticmethod
    async def _input(start: pb.ExecStart, given: str | bytes | None) -> AsyncIterator[pb.ExecRequest]:
        yield pb.ExecRequest(start=start)
        if given is None:
            return
        data = given.encode() if isinstance(given, str) else given
        for at in range(0, len(data), CHUNK):
            yield pb.ExecRequest(stdin=data[at : at + CHUNK])
        yield pb.ExecRequest(stdin_eof=True)

    @staticmethod
    def _not_started(error: grpc.aio.AioRpcError, cmd: list[str], user: str | None) -> ExecResult[str]:
        why = reason(error)
        if why == "PROGRAM_NOT_EXECUTABLE":
            raise PermissionError(error.details()) from error
        if why == "PROGRAM_NOT_FOUND":
            return ExecResult(success=False, returncode=127, stdout="", stderr=error.details() or "")
        if why.startswith("USER_"):
            raise SandboxUserUnsupportedError(user or "", error.details() or "") from error
        raise error

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents

        async def messages() -> AsyncIterator[pb.WriteFileRequest]:
            start = pb.WriteFileStart(sandbox_id=self.id, path=os.fsencode(file), by="inspect")
            yield pb.WriteFileRequest(start=start)
            for at in range(0, len(data), CHUNK):
                yield pb.WriteFileRequest(data=data[at : at + CHUNK])

        try:
            await self.stub.WriteFile(messages())
        except grpc.aio.AioRpcError as error:
            raise os_error(error, file) from error

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        data = bytearray()
        call = self.stub.ReadFile(pb.ReadFileRequest(sandbox_id=self.id, path=os.fsencode(file)))
        try:
            async for chunk in call:
                data += chunk.data
                if len(data) > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                    call.cancel()
                    raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        except grpc.aio.AioRpcError as error:
            raise os_error(error, file) from error
        return bytes(data).decode("utf-8") if text else bytes(data)

    @classmethod
    async def sample_cleanup(cls, task_name, config, environments, interrupted) -> None:
        for environment in environments.values():
            await environment.as_type(Exuvia).kill()


def reason(error: grpc.aio.AioRpcError) -> str:
    """The stable reason in an error's details; empty where there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for detail in status_pb2.Status.FromString(value).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    return info.reason
    return ""


def os_error(error: grpc.aio.AioRpcError, file: str) -> Exception:
    kinds = {
        "FILE_NOT_FOUND": FileNotFoundError,
        "FILE_PERMISSION": PermissionError,
        "FILE_IS_DIRECTORY": IsADirectoryError,
    }
    kind = kinds.get(reason(error))
    return kind(f"{file}: {error.details()}") if kind else error
