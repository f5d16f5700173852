"""Tests that need no accelerator: these run as they are."""

import os
import unittest

import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks


class MicrobatchTest(unittest.TestCase):
    def test_chunks(self) -> None:
        chunks, _ = split_args_kwargs_into_chunks((torch.ones(4, 2),), {}, 2)
        assert [tuple(chunk[0].shape) for chunk in chunks] == [(2, 2), (2, 2)]

    def test_crashes_always(self) -> None:
        os._exit(3)

    @unittest.skip("never")
    def test_is_skipped(self) -> None:
        raise AssertionError

    def test_source_is_untouched(self) -> None:
        assert "nccl" == "n" + "ccl"
