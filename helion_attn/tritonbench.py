"""The public path of the tritonbench plugin; its code is `helion_attn.integrations.tritonbench`."""

from helion_attn.integrations.tritonbench import BACKEND, METRIC, OPERATOR, main, register

__all__ = ["BACKEND", "METRIC", "OPERATOR", "main", "register"]

if __name__ == "__main__":
    main()
