"""Example of an agent program: a solver and a checker over plain HTTP, as any client of OpenAI's API would ask them."""

import httpx

from rollout.orchestras.program import Job

_ATTEMPTS = 2


async def solve_and_check(job: Job) -> str:
    """Ask the model `solver` until the model `verifier` approves, and answer what it said last."""
    async with httpx.AsyncClient(
        base_url=job.openai_url,
        headers={"Authorization": f"Bearer {job.key}"},
        timeout=600,
        trust_env=False,
    ) as http:

        async def ask(model: str, text: str) -> str:
            body = {"model": model, "messages": [{"role": "user", "content": text}]}
            reply = (await http.post("/chat/completions", json=body)).raise_for_status().json()
            return str(reply["choices"][0]["message"]["content"])

        for attempt in range(1, _ATTEMPTS + 1):
            solution = await ask("solver", job.problem)
            if attempt == _ATTEMPTS or "approve" in await ask(
                "verifier", f"Check: {job.problem}\n{solution}"
            ):
                break
    return solution
