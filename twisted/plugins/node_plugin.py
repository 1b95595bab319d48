"""Makes `twistd node` known."""

from twisted.application.service import ServiceMaker

node = ServiceMaker("node", "node.tap", "Run proxy cores for many users, driven over REST and gRPC.", "node")
