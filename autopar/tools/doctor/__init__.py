"""Is this machine fit for training? ``autopar doctor``: one page of findings, each with a remedy where it needs one.

Input: a `page.Request`. Output: a `page.Page` of `finding.Finding`. Nothing on the machine is changed, but torch's
cache of compiled code.

A probe runs under a time limit, and work that may hang or crash runs in processes of its own, so that a broken machine
still gets its page. Rates are measured as `autopar profile` measures them, and compared with the cost model's.

Files in reading order:

- `finding.py`: a finding, and a probe. `attempt.py`: a probe under its limit. `in_processes.py`: work in processes.
- `page.py`: all probes in order.
- Probes: `versions.py`, `limits.py` with `cgroups.py`, `launcher.py`, `host.py`, `variables.py`, `compiler.py`,
  `planning.py`, `disk.py`.
- Devices and their links: `devices.py` with `gpu_processes.py`, `links.py` with `transfers.py`, `nvidia_smi.py`.

    >>> page = checked_machine(Request())
    >>> next(finding for finding in page.findings if finding.name == "open files")
    Finding(section='limits', name='open files', status='ok', value='20,000 for each process', remedy='', rate=None)
"""
