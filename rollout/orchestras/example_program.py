"""Example of an agent program: a solver and a verifier, called over HTTP as by any client."""

import httpx

from rollout.orchestras.program import Job

_MAX_ATTEMPTS = 2


async def solve_and_check(job: Job) -> str:
    """Ask the model `solver` until the model `verifier` approves; return the last solution.

    The solver is asked `_MAX_ATTEMPTS` times at most, and its last attempt is not verified.
    """
    async with httpx.AsyncClient(
        base_url=job.openai_url,
        headers={"Authorization": f"Bearer {job.key}"},
        timeout=600,
        trust_env=False,
    ) as client:

        async def ask(model: str, text: str) -> str:
            body = {"model": model, "messages": [{"role": "user", "content": text}]}
            response = await client.post("/chat/completions", json=body)
            response.raise_for_status()
            return str(response.json()["choices"][0]["message"]["content"])

        for attempt in range(1, _MAX_ATTEMPTS + 1):
            solution = await ask("solver", job.problem)
            if attempt == _MAX_ATTEMPTS:
                break
            verdict = await ask("verifier", f"Check: {job.problem}\n{solution}")
            if "approve" in verdict:
                break
    return solution
