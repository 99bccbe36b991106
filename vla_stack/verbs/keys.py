"""``vla keys``: make and exchange the keys that connections off this machine need."""

from __future__ import annotations

import argparse

from vla_stack.serving.keys import KeyFolder, Role

HELP = "Keys for policy servers and robots on different machines."
EXAMPLES = (
    "vla keys create gpu                              # once on each computer; prints its public key",
    "vla keys allow 'PUBLIC-KEY-OF-ARM' --name arm1   # on the server",
    "vla keys trust gpu.lab:5555 'PUBLIC-KEY-OF-GPU'  # on the robot",
    "vla serve --endpoint tcp://0.0.0.0:5555          # on the server, then on the robot:",
    "vla run --server tcp://gpu.lab:5555 --robot lerobot --robot-arg robot_type=so101_follower",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", metavar="DIR", help="folder of the keys (default: VLA_KEYS, or ~/.config/vla-stack)")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make this computer's keys")
    create.add_argument("name", help="name of this computer, e.g. gpu or arm1")
    actions.add_parser("show", help="print this computer's public key")
    allow = actions.add_parser("allow", help="let a peer connect to servers here")
    allow.add_argument("key", help="its public key")
    allow.add_argument("--name", required=True, help="what to call it")
    allow.add_argument(
        "--role",
        type=Role,
        choices=tuple(Role),
        default=Role.ROBOT,
        help="what it may do: a robot asks a policy server for chunks, an operator drives a robot of "
        "`vla robot serve`, an observer sees whether a server lives (default: robot)",
    )
    revoke = actions.add_parser("revoke", help="no longer let a peer connect")
    revoke.add_argument("name")
    trust = actions.add_parser("trust", help="pin the key of a server")
    trust.add_argument("server", metavar="HOST:PORT")
    trust.add_argument("key", help="its public key")
    actions.add_parser("list", help="print who may connect here")


def main(args: argparse.Namespace) -> int:
    folder = KeyFolder(args.keys)
    if args.action == "create":
        print(folder.create(args.name).public)
    elif args.action == "show":
        print(folder.identity().public)
    elif args.action == "allow":
        folder.allow(args.key, args.name, args.role)
    elif args.action == "revoke":
        folder.revoke(args.name)
    elif args.action == "trust":
        folder.trust(args.server, args.key)
    else:
        for key, peer in folder.allowed().items():
            print(f"{peer.role:9}{peer.name:20}{key}")
    return 0
