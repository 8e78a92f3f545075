"""Write docs/correctness.md: part of `make exactness`."""

from tests.correctness import PAGE, page
from tests.support.credit_oracle import largest_differences

PAGE.write_text(page(largest_differences()), encoding="utf-8")
