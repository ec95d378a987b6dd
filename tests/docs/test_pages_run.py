"""The pages for operators and engine authors say what can be done: their commands, settings and code are run here.

`test_tutorial.py` runs the tutorials of plugins, lmcache-l0's own tests run those of L0.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lmcache_core.client.why import explaining

from ..conftest import Node

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def fenced(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [block for named, block in blocks if named == language]


def command_line(*words: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    words = (sys.executable, "-m", "lmcache_core.cli.main", *words)
    env = os.environ | {"HOME": str(cwd), "XDG_RUNTIME_DIR": str(cwd), "COLUMNS": "80"}  # as on the pages
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=True, **options)


def commands(block: str) -> list[list[str]]:
    """The words of each `lmcache-core` line, without its comment."""
    lines = block.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines if line.startswith("lmcache-core ")]
    return [[word for word in words[1:] if word != "&"] for words in split]


def test_an_operators_first_commands_run_in_the_order_of_the_page(tmp_path: Path) -> None:
    first = commands(fenced("operating/server.md", "sh")[0])
    assert [words[0] for words in first] == ["init", "check", "serve", "status", "status", "top"]
    command_line(*first[0], cwd=tmp_path)
    small = ["--l1.size_bytes", "16MiB", "--l1.backing", "memfd", "--runtime_dir", str(tmp_path / "run")]
    small += ["--state_dir", str(tmp_path / "state"), "--l2.disk.path", str(tmp_path / "disk")]
    said = command_line(*first[1], *small, cwd=tmp_path)
    assert "disk" in said.stdout
    server = subprocess.Popen(
        [sys.executable, "-m", "lmcache_core.cli.main", *first[2], *small],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        said = command_line(*first[3], "--json", "--runtime-dir", str(tmp_path / "run"), cwd=tmp_path)
        assert [tier["name"] for tier in json.loads(said.stdout)["tiers"]["tiers"]] == ["disk"]
        said = command_line(*first[5], "--runtime-dir", str(tmp_path / "run"), cwd=tmp_path)  # into a pipe: one frame
        assert said.stdout.startswith("lmcache-core default, serving")
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0


def test_the_settings_on_the_operators_page_are_settings(tmp_path: Path) -> None:
    (tmp_path / "lmcache.toml").write_text(fenced("operating/server.md", "toml")[0])
    found = json.loads(command_line("config", "--json", cwd=tmp_path).stdout)
    assert found["l2.disk.capacity_bytes"]["origin"] == "file"


def on_a_machine_of_its_own(script: str, cwd: Path, **variables: str) -> str:
    """What a script prints where nothing else runs: with an /etc to write to, an empty /dev/shm, every port free, and
    the default name and directories. So the lines of a page run as they are written."""
    if None in map(shutil.which, ("unshare", "ip", "curl")):
        pytest.skip("NOT CHECKED: fresh namespaces need unshare and ip; and the pages call curl")
    commands = cwd / "commands"
    commands.mkdir()
    for name, called in (("lmcache-core", "-m lmcache_core"), ("python", "")):
        (commands / name).write_text(f'#!/bin/sh\nexec {sys.executable} {called} "$@"\n')
        (commands / name).chmod(0o755)
    layers = cwd / "layers"
    layers.mkdir()
    prelude = f"""
        ip link set lo up
        mount -t tmpfs none /dev/shm
        mount -t tmpfs none {layers}
        mkdir {layers}/upper {layers}/work
        mount -t overlay overlay -o lowerdir=/etc,upperdir={layers}/upper,workdir={layers}/work /etc
        for each in /mnt /run /var/lib; do mount -t tmpfs none $each; done
        trap 'kill $(jobs -p) 2>/dev/null || true; wait || true' EXIT
        serving() {{ until grep -qs ready "$1"; do kill -0 $!; sleep 0.05; done; }}
    """
    namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--net"]
    if subprocess.run([*namespaces, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("NOT CHECKED: this user may not make namespaces")
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_CORE_")} | variables
    env |= {"HOME": str(cwd), "XDG_RUNTIME_DIR": str(cwd), "COLUMNS": "80", "PATH": f"{commands}:{os.environ['PATH']}"}
    command = [*namespaces, "bash", "-euc", prelude + script]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_five_minutes_lead_to_the_hits_that_the_page_shows(tmp_path: Path) -> None:
    install, serve = fenced("five-minutes.md", "sh")
    assert "pip install ./core ./plugins/lmcache-fs" in install
    (tmp_path / "prompt.py").write_text(fenced("five-minutes.md", "python")[0])
    first, counted, without_server, after_crash, why_not = fenced("five-minutes.md", "")[:5]

    def typed(shown: str) -> str:
        lines = [line.removeprefix("$ ") for line in shown.splitlines() if line.startswith("$ ")]
        return "".join(f"echo {shlex.quote('$ ' + line)}\n{line} 2>>warnings\n" for line in lines)

    start = f"rm -f log\n{serve.strip()} >log &\nserving log\n"
    script = start + typed(first) + typed(counted) + "kill -9 $!; wait $! || true\n" + typed(without_server)
    said = on_a_machine_of_its_own(script + start + typed(after_crash) + typed(why_not), tmp_path)
    assert said == first + counted + without_server + after_crash + why_not
    assert "cannot reach the lmcache-core server" in (tmp_path / "warnings").read_text()


def test_the_front_page_leads_to_hits_in_another_process_and_after_a_kill(tmp_path: Path) -> None:
    """Its two commands but for the first half, which installs."""
    serve = next(line for line in fenced("../README.md", "sh")[0].splitlines() if line.startswith("lmcache-core serve"))
    (tmp_path / "use.py").write_text(fenced("../README.md", "python")[0])
    start = f"rm -f log\n{serve} >log &\nserving log\n"
    script = start + "python use.py\npython use.py\nkill -9 $!; wait $! || true\n" + start + "python use.py\n"
    lines = on_a_machine_of_its_own(script, tmp_path).splitlines()
    assert lines[::2] == [f"{found} of 4 chunks were there" for found in (0, 4, 4)]
    assert set(lines[1::2]) == {"4 of 4 chunks read, byte for byte: True"}


def test_the_front_page_says_in_words_that_there_is_no_server(tmp_path: Path) -> None:
    (tmp_path / "use.py").write_text(fenced("../README.md", "python")[0])
    said, _, warnings = on_a_machine_of_its_own("python use.py 2>warnings; cat warnings", tmp_path).partition("cannot")
    found, reason, read = said.splitlines()
    assert found == "0 of 4 chunks were there"
    assert reason.startswith("no cache: no server answers at")
    assert read == "0 of 4 chunks read, byte for byte: False"
    assert warnings.startswith(" reach the lmcache-core server 'default'")
    assert "start one with `lmcache-core serve" in warnings


def test_the_example_of_pages_runs(tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(fenced("engines/pages.md", "python")[0])
    script = "lmcache-core serve --l1.size_bytes 64MiB >log &\nserving log\npython pages.py"
    assert on_a_machine_of_its_own(script, tmp_path) == "3 of 3 stored\n3 hits; not to be trusted: []\n"


def test_the_example_of_transfers_runs(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_copier")
    code = fenced("engines/transfers.md", "python")[0]
    (tmp_path / "transfers.py").write_text(code.replace('"auto"', '"server"'))
    script = (
        "lmcache-core serve --l1.size_bytes 64MiB --copier.threads 1 >log &\nserving log\n"
        "until python transfers.py 2>why; do grep -q 'no copier answers' why || { cat why; break; }; done"
    )
    assert on_a_machine_of_its_own(script, tmp_path) == "3 stored\n3 hits\n"


def test_the_page_of_http_and_the_scrape_configuration_reach_a_server_with_its_token(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_http")
    yaml = pytest.importorskip("yaml")
    (tmp_path / "lmcache.toml").write_text(fenced("operating/http.md", "toml")[0])
    [configuration] = fenced("../contrib/dashboards/README.md", "yaml")
    [job] = yaml.safe_load(configuration)["scrape_configs"]
    token, [target] = job["authorization"]["credentials_file"], job["static_configs"][0]["targets"]
    script = f"""
        mkdir /etc/lmcache
        umask 077
        for each in http-token {token}; do (cd /etc/lmcache; echo a-token-of-32-letters-for-$each >$each); done
        lmcache-core serve >log &
        until curl -sf http://127.0.0.1:8080/readyz >/dev/null; do kill -0 $!; sleep 0.1; done
        {fenced("operating/http.md", "sh")[0]}
        echo; echo scraped
        curl -sSf -H "Authorization: Bearer $(cat {token})" http://{target}/metrics
        curl -so /dev/null -w '%{{http_code}}' -X POST http://{target}/clear-cache
    """
    small = {"LMCACHE_CORE_L1__SIZE_BYTES": "16MiB", "LMCACHE_CORE_L2__DISK__TYPE": "fs"}
    small["LMCACHE_CORE_HTTP__READ_TOKEN_FILE"] = token  # the page of the dashboards has one for reading
    said = on_a_machine_of_its_own(script, tmp_path, **small, LMCACHE_CORE_L2__DISK__PATH=str(tmp_path / "disk"))
    page, _, scraped = said.partition("\nscraped\n")
    assert "lmcache_core_info{" in page
    assert "lmcache_core_info{" in scraped
    assert scraped.endswith("401")


def test_the_readme_of_http_asks_a_server_as_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_http")
    prompt = fenced("five-minutes.md", "python")[0]
    (tmp_path / "again.py").write_text("import lmcache_core\nlmcache_core.Client.connect().clear()\n" + prompt)
    ready, events, clear = fenced("../plugins/lmcache-http/README.md", "sh")
    serve, follow = events.splitlines()
    answers = "until curl -sf http://127.0.0.1:8080/readyz >/dev/null; do kill -0 $!; sleep 0.1; done"
    script = f"""
        {serve} --l1.size_bytes 32MiB >log &
        {answers}
        {ready.splitlines()[-1]}; echo
        {follow.replace(" -N ", " -sN ").partition("#")[0]} >events &
        until grep -qs admitted events; do kill -0 $!; python again.py >/dev/null; done
        kill %1; wait %1
        mkdir /etc/lmcache && (umask 077 && echo a-token-of-32-letters-for-the-page >/etc/lmcache/token)
        {serve} --l1.size_bytes 32MiB --http.token_file /etc/lmcache/token >log &
        {answers}
        {clear}
    """
    on_ready, cleared = on_a_machine_of_its_own(script, tmp_path).splitlines()
    assert json.loads(on_ready) == {"status": "ok", "why": []}
    assert "detail" not in json.loads(cleared)


def test_the_commands_about_quotas_run_as_the_page_has_them(tmp_path: Path) -> None:
    block = next(each for each in fenced("operating/eviction.md", "sh") if "quota set" in each)
    tier = {"LMCACHE_CORE_L2__SSD__TYPE": "fs", "LMCACHE_CORE_L2__SSD__PATH": str(tmp_path / "ssd")}
    script = "lmcache-core serve --l1.size_bytes 64MiB >log &\nserving log\n"
    said = on_a_machine_of_its_own(script + block.replace("10GiB", "10MiB").replace("20GiB", "20MiB"), tmp_path, **tier)
    assert "ssd: nothing reserved, limit 1TiB" in said
    assert said.endswith("tenant 'chat' has no quota any more; its objects stay\n")


def test_the_files_of_the_unit_go_where_the_page_says(tmp_path: Path) -> None:
    """Without a systemd that runs, and without an index that has us."""
    blocks = [each for each in fenced("../contrib/deploy/README.md", "sh") if "/etc/systemd" in each]
    lines = [line.partition(" && systemd-sysusers")[0] for block in blocks for line in block.splitlines()]
    run = [line for line in lines if line.startswith(("cp ", "install ", "printf "))]
    assert len(run) == 5
    (tmp_path / "contrib").symlink_to(ROOT / "contrib")
    shown = "cd /etc && find sysusers.d systemd lmcache-core -type f"
    script = "\n".join(["mkdir -p /etc/sysusers.d", "lmcache-core init >/dev/null", *run, shown])
    said = on_a_machine_of_its_own(script, tmp_path)
    units = ["lmcache-core@.service", *(f"lmcache-core@default.service.d/{name}.conf" for name in ("memory", "disk"))]
    expected = {
        "sysusers.d/lmcache-core.conf",
        "lmcache-core/default.toml",
        *(f"systemd/system/{name}" for name in units),
    }
    assert expected <= set(said.splitlines())


def lines_of(page: str, start: str) -> str:
    """The block of a page that begins so, without what installs, and what would not end."""
    block = next(each for each in fenced(page, "sh") if each.startswith(start))
    apart = ("pip install", "lmcache-core serve")
    return "".join(line for line in block.splitlines(True) if not line.startswith(apart))


SERVE = ": >log\nlmcache-core serve --l1.size_bytes 32MiB {} >log &\nserving log\n"


def test_the_commands_that_watch_a_server_run_as_the_page_has_them(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_tools")
    top = lines_of("operating/watching.md", "pip install lmcache-tools").replace(">>", "| head -n 1 >>")  # it goes on
    said = on_a_machine_of_its_own(f"set +o pipefail\n{SERVE.format('')}{top}cat figures.jsonl", tmp_path)
    *frames, figures = said.splitlines()
    assert sum(line.startswith("lmcache-core default, serving") for line in frames) == 3
    assert json.loads(figures)["troubles"] == []


def test_tiers_are_changed_at_run_time_as_the_page_has_it(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_fs")
    (tmp_path / "lmcache.toml").write_text('[l2.cold]\ntype = "fs"\npath = "/mnt/cold"\n')
    block = lines_of("operating/tiers.md", "lmcache-core tiers list")
    # The second way to add it, after the first is gone; and nobody is there to be asked.
    again = "lmcache-core tiers add cold --config"
    block = block.replace("remove cold\n", "remove cold --yes\n")
    block = block.replace(again, f"lmcache-core tiers remove cold --yes\n{again}")
    start = "cp lmcache.toml kept && rm lmcache.toml\n" + SERVE.format("") + "mv kept lmcache.toml\n"
    said = on_a_machine_of_its_own(start + block + "lmcache-core tiers list", tmp_path)
    assert said.count("tier 'cold' is added, as the last; tiers in order: cold") == 2
    assert "tier 'cold' gets no more stores; it serves 0 objects" in said
    assert said.endswith("the server has no tiers: add one with `lmcache-core tiers add`\n")


def test_the_commands_that_walk_a_tier_run_as_the_pages_have_them(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_tools")
    pytest.importorskip("lmcache_fs")
    (tmp_path / "prompt.py").write_text(fenced("five-minutes.md", "python")[0])
    toml = "".join(f'[l2.{name}]\ntype = "fs"\npath = "/mnt/{name}"\n' for name in ("ssd", "cold"))
    (tmp_path / "lmcache.toml").write_text(toml)
    walks = lines_of("operating/tiers.md", "lmcache-core warm") + "".join(
        line + "\n"
        for line in fenced("../contrib/lmcache-tools/README.md", "sh")[0].splitlines()
        if line.startswith(("lmcache-core warm", "lmcache-core verify", "lmcache-core copy"))
    )
    stored = SERVE.format("") + "python prompt.py\nkill $!; wait $!\nrm -r /mnt/cold\n" + SERVE.format("")
    said = on_a_machine_of_its_own(stored + walks + "find /mnt/cold -type f | wc -l", tmp_path)
    assert int(said.splitlines()[-1]) >= 4, said


def test_a_recording_is_made_read_replayed_and_simulated_as_the_pages_have_it(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_lab")
    (tmp_path / "prompt.py").write_text(fenced("five-minutes.md", "python")[0])
    made, used = (lines_of("operating/recording.md", each) for each in ("pip install", "lmcache-core trace replay"))
    used = "".join(line for line in used.splitlines(True) if "lookup_hashes" not in line)  # a file of LMCache's
    start = "mkdir /var/lib/lmcache\n" + SERVE.format("")
    made = made.replace("lmcache-core trace stop", "python prompt.py\nlmcache-core trace stop")
    trial = "ln -s /var/lib/lmcache/trace trace\n" + SERVE.format("--name trial").replace("log", "trial-log")
    readme = lines_of("../contrib/lmcache-lab/README.md", "pip install").partition("lmcache-core trace info")
    again = readme[1] + readme[2].replace("10000 100000", "1000")
    said = on_a_machine_of_its_own(start + made + trial + used + again + "\nwc -l < mine.jsonl", tmp_path)
    assert int(said.splitlines()[-1]) > 0, said
    assert "hit rate" in said, said


def test_a_missed_prompt_is_explained_as_the_pages_have_it(tmp_path: Path) -> None:
    (tmp_path / "prompt.tokens").write_text(" ".join(map(str, range(512))))
    lines = lines_of("operating/why-did-it-miss.md", "lmcache-core explain")
    lines += lines_of("operating/troubleshooting.md", "lmcache-core check")
    said = on_a_machine_of_its_own(SERVE.format("") + lines, tmp_path)
    assert said.count("never_stored") == 4
    assert "NOT OK" not in said
    assert "'default' is running" in said


def test_the_metrics_of_a_timer_go_where_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_http")
    line = lines_of("operating/metrics.md", "lmcache-core metrics")
    script = f"mkdir /var/lib/node_exporter\n{SERVE.format('')}{line}cat /var/lib/node_exporter/*"
    assert "lmcache_core_info{" in on_a_machine_of_its_own(script, tmp_path)


def test_a_drill_with_the_mock_tier_runs_as_its_page_has_it(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_mock")
    page = "../plugins/lmcache-mock/README.md"
    (tmp_path / "lmcache.toml").write_text(fenced(page, "toml")[0])
    script = f"mkdir /run/lmcache\n{SERVE.format('')}{lines_of(page, 'lmcache-core mock')}"
    assert "tier      cold: 0 B" in on_a_machine_of_its_own(script, tmp_path)


def test_every_figure_that_troubleshooting_names_stands_in_a_status(node: Node, tmp_path: Path) -> None:
    node.serve("--l2.disk.type", "fs", "--l2.disk.path", str(tmp_path / "disk"))
    where = ["--json", "--name", node.name, "--runtime-dir", str(node.run)]
    status = json.loads(command_line("status", *where, cwd=tmp_path).stdout)
    page = (DOCS / "operating/troubleshooting.md").read_text()
    named = set(re.findall(r"`((?:l1|pool|tiers|index)(?:\.[a-z_]+)+|longest_turn)`", page))
    settings = {"l1.access", "l1.backing", "l1.size_bytes"}
    assert len(named - settings) > 6
    for name in sorted(named - settings):
        found = status
        for part in name.split("."):
            assert part in found, f"`{name}` is no part of a status"
            found = found[part]
    words = {
        word for row in re.findall(r"^\| `explain`:(.*?)\|", page, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)
    }
    assert words
    assert words <= set(explaining.sentences())


def test_the_sizes_on_the_page_of_capacity_are_those_that_the_command_prints(tmp_path: Path) -> None:
    said = command_line(*commands(fenced("operating/capacity.md", "sh")[0])[0], cwd=tmp_path).stdout
    assert said == fenced("operating/capacity.md", "")[0]


STARTS_A_SERVER = ["README.md", "core/README.md", "docs/engines/vllm.md", "docs/engines/transformers.md"]


@pytest.mark.parametrize("page", STARTS_A_SERVER)
def test_the_servers_that_a_first_page_starts_take_those_flags(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    serves = [words for block in blocks for words in commands(block) if words[0] == "serve"]
    assert serves
    for words in serves:
        said = json.loads(command_line("config", *words[1:], "--json", cwd=tmp_path).stdout)
        assert said["l1.size_bytes"]["origin"] != "default"


def test_what_the_page_of_vllm_configures_is_what_its_engines_are_tested_with() -> None:
    """Those run in `nox -s vllm`: a prompt, a restart, the prompt again."""
    pages = ["engines/vllm.md", "../contrib/lmcache-core-vllm/README.md"]
    said = [
        json.loads(re.findall(r"--kv-transfer-config '(.*?)'", fenced(page, "sh")[0], re.DOTALL)[0]) for page in pages
    ]
    assert said[0] == said[1]
    driver = (ROOT / "contrib/lmcache-core-vllm/tests/engine/driver.py").read_text()
    for name, value in said[0].items():
        assert f'"{name}"' in driver
        assert f'"{value}"' in driver


@pytest.mark.slow
def test_the_page_of_transformers_leads_to_a_first_hit(node: Node, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "model"
    save_a_small_model(model, transformers)
    node.serve("--l1.backing", "memfd", size="64MiB")
    code = fenced("engines/transformers.md", "python")[0].replace('"Qwen/Qwen3-0.6B"', repr(str(model)))
    code = code.replace(".connect()", f".connect({node.name!r}, runtime_dir={str(node.run)!r})")
    code = f"document = 'In the beginning was the prefix. ' * 40\n{code}\nassert first.tokens_reused == (0,), first\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"without computing (256|512|768|1024|1280) tokens\n$", done.stdout), done.stdout


def save_a_small_model(folder: Path, transformers: ModuleType) -> None:
    """In the place of the model that the page downloads: a Llama with random weights, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(letters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def test_the_settings_page_shows_what_its_files_give(tmp_path: Path) -> None:
    pytest.importorskip("lmcache_redis")
    pytest.importorskip("yaml")
    script = next(block for block in fenced("plugins/settings.md", "sh") if "secrets" in block)
    shown = next(block for block in fenced("plugins/settings.md", "") if "l2.shared" in block)
    command = tmp_path / "lmcache-core"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lmcache_core.cli.main "$@"\n')
    command.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COLUMNS": "400"}
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(["sh", "-e", "-c", script], cwd=work, env=env, capture_output=True, text=True, check=True)
    printed = {tuple(line.split()) for line in done.stdout.replace(str(work), "/…").splitlines()}
    assert {tuple(line.split()) for line in shown.splitlines()} <= printed
    assert "hunter2" not in done.stdout + done.stderr
