"""`paceline mcp`: options of the MCP server of `paceline.loop.mcp`."""

from __future__ import annotations

from typing import Annotated, Any

from paceline.commands.options import Changed, Only, Opt, Without, options
from paceline.commands.shared import Json, say
from paceline.config import EngineConfig
from paceline.loop.adapt.config import (
    CandidateConfig,
    DeployConfig,
    PolicyConfig,
    PriceConfig,
    RetrainConfig,
    StoreConfig,
)
from paceline.loop.mcp.config import McpConfig

SERVER = Changed(servers=Opt("--server", help="Address of the paceline server that gets rolled-out drafters."))


@options
def mcp(
    config: Annotated[McpConfig, Changed(folders=Opt("--folder"))],
    target: Annotated[EngineConfig, Only("model", "dtype", "device")],
    store: Annotated[StoreConfig, Changed(state=Opt(default="runs/mcp"))],
    policy: PolicyConfig,
    prices: PriceConfig,
    candidate: Annotated[CandidateConfig, Without("clusters", "tags", "tracked", "since", "held_out_only")],
    retrain: Annotated[RetrainConfig, Without("train_command", "train_units", "train_hours_budget")],
    deploy: Annotated[DeployConfig, Only("servers", "admin_key", "patience_s"), SERVER],
    as_json: Json = False,
) -> dict[str, Any]:
    """Let an AI agent adapt a server's drafter, over MCP.

    Runs an MCP server, which listens on loopback and needs a key. With its tools, an agent looks at a paceline server's
    traffic, trains a drafter for it, tests the drafter and loads it into the server. The tools are traffic, propose,
    train, score, gate, status, roll_out, roll_back and read_log.

    Model, folders, server and thresholds are set by this command's options, and no tool can change them or use other
    files. A drafter is rolled out only if it passed the gate, a test on stored requests. All calls are logged in
    calls.jsonl in --state, also the rejected ones. Trainings and gates run as child processes; if one is interrupted,
    calling the tool again with the same arguments resumes it.

    Examples:
      paceline mcp --traces traces --server http://127.0.0.1:8000
      paceline mcp --traces traces --model Qwen/Qwen3-8B \\
        --incumbent runs/mine/drafter --folder runs/mine --port 8765
    """
    from paceline.loop.mcp.operations import Operations
    from paceline.loop.mcp.server import run

    parts = (store, target, policy, prices, candidate, retrain, deploy)
    run(Operations(*parts, config.folders), config, say)
    return {"state": store.state}
