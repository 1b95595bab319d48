"""Upgrades among everything, with versions that break at random points."""

import os, random, signal, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
import psutil, pytest
from scripts.staging.controller import RpcController
from scripts.staging.version import Version
from scripts.staging.wait import until
from tests.conftest import Place, connection, control, settled, talking
from tests.harness.upgraded import RealNode, kept
from tests.live.test_limits_any_order import agree, PEOPLE
from tests.live import test_limits_any_order as tl
from tests.live.test_upgrades_any_order import Upgraded, DRAIN, goes_on, upgrades

tl.SECONDS = float(os.environ.get("RV_SECONDS", "30"))
POINTS = ["_listen_for_metrics", "_tell_reloads", "_ready", "_sweep", "startService"]
HOW = [
    "raise RuntimeError('rv')",
    "raise SystemExit('rv')",
    "__import__('time').sleep(60)",
    "os._exit(3) if 0 else (_ for _ in ()).throw(OSError(28,'rv'))",
    "__import__('time').sleep(1.5); return _old(self, *a)",
]


class Breaks(Upgraded):
    version = None

    def upgrade(self):
        c = self._chance
        before = upgrades(self._node)
        tap = self.version.root / "node/tap.py"
        if c.random() < 0.5:
            point, how = c.choice(POINTS), c.choice(HOW)
            tap.write_text(
                self.version.tap
                + f"\n_old = NodeService.{point}\ndef _rv(self, *a):\n    {how}\nNodeService.{point} = _rv\n"
            )
        elif c.random() < 0.3:
            tap.write_text(
                self.version.tap
                + "\nfrom node.api.operations import Backend as _B\ndef _broken(self, left, heirs):\n    async def no(plan):\n        heirs.failed('no hand-over')\n    self._leaving._heirs = heirs\n    self._runner.inherit(no)\n_B.inherit = _broken\n"
            )
        else:
            tap.write_text(self.version.tap)
        os.kill(self._node.pid, signal.SIGUSR2)
        if c.random() < 0.3:
            time.sleep(c.random())
            os.kill(self._node.pid, signal.SIGUSR2)
        if c.random() < 0.3:
            time.sleep(c.random() * 3)
            os.kill(self._node.pid, signal.SIGHUP)
        over = time.monotonic() + 40
        while upgrades(self._node) <= before and time.monotonic() < over:
            time.sleep(0.1)
        time.sleep(0.5)
        over = time.monotonic() + 20
        while time.monotonic() < over and [
            x for x in self._node.state.iterdir() if x.name in ("program.new", "program.old")
        ]:
            time.sleep(0.1)
        time.sleep(0.5)


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("seed", [int(os.environ.get("RV_SEED", "1"))])
def test_rv(ground, seed, crashes, tmp_path, all_kinds, cover, echo):
    version = Version(tmp_path)
    version.add("node/upgrade/program.py", "PATIENCE = 12.0")
    version.tap = (version.root / "node/tap.py").read_text()
    with RealNode(tmp_path, DRAIN_TIMEOUT=str(DRAIN), PYTHONPATH=str(version.root)) as real:
        kept(real)
        place, pid = Place(all_kinds["vless-raw"], "in", ground=ground), real.pid
        with closing(RpcController(real)) as controller, control(real, "rest") as other:
            chaos, rest = Breaks(real, controller, place, echo, seed), Breaks(real, other, place, echo, seed + 100)
            chaos.version = rest.version = version
            with settled([place], cover):
                chaos.start()
            held = psutil.Process(pid).num_fds()
            words = {
                chaos.set_limits: 10,
                chaos.sync_one: 10,
                chaos.remove_and_add: 4,
                chaos.sync_all: 4,
                chaos.start: 1,
            }
            try:
                with ThreadPoolExecutor(4) as pool:
                    done = [
                        pool.submit(chaos.act, words),
                        pool.submit(
                            rest.act, {rest.set_limits: 5, rest.carry: 3, **({rest.kill_core: 1} if crashes else {})}
                        ),
                        pool.submit(rest.act, {rest.upgrade: 1}),
                        pool.submit(rest.act, {rest.stay: 1}),
                    ]
                    for each in done:
                        each.result()
                (version.root / "node/tap.py").write_text(version.tap)
                time.sleep(14)
                until(lambda: controller.info().running, 60, "the core is there")
                until(lambda: agree(real, controller, place), 30, "core and memory agree")
                until(lambda: len(real.core_pids()) == 1, DRAIN + 20, "there is one core")
                before = upgrades(real)
                chaos.upgrade.__func__  # noqa
                os.kill(pid, signal.SIGUSR2)
                until(lambda: upgrades(real) > before and controller.info().running, 60, "another upgrade")
                until(lambda: agree(real, controller, place), 30, "core and memory agree")
                assert real.pid == pid and psutil.Process(pid).is_running()
                until(lambda: len(real.core_pids()) == 1, DRAIN + 20, "there is one core")
                print("FDS", held, psutil.Process(pid).num_fds())
                until(lambda: psutil.Process(pid).num_fds() <= held + 5, 20, "no descriptor is left over")
                real.kill()
                real.start()
                until(lambda: controller.info().running, 60, "the core is back")
                until(lambda: agree(real, controller, place), 30, "disk and core agree")
            finally:
                print(
                    f"{upgrades(real) - 1} upgrades, with several {goes_on(real)}, failed {sum('was not upgraded' in l for l in real.lines)}"
                )
                open(f"/tmp/rv_node_{ground.name}_{crashes}_{seed}.log", "w").write("\n".join(real.lines))
