"""tools/check_wgmma.py finds touched registers of products in flight, and nothing else."""

import re

import pytest
from sass_listing import listing

from tools import check_wgmma, sass

S = "HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0"  # sums R24-R31
O = "HGMMA.64x16x16.F32.BF16 R40, R56, gdesc[UR8].tnspB, R40, gsb0"  # sums R40-R47, A R56-R59
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x{}"


def findings(*lines):
    (kernel,) = sass.parse(listing(*lines))
    return check_wgmma.check(kernel).findings


def assert_found(found, *wanted):
    """Each finding matches its pattern, in the order of the code."""
    assert len(found) == len(wanted), found
    for text, pattern in zip(found, wanted):
        assert re.search(pattern, text), (text, pattern)


# ---- Clean code ----


def test_pipelined_loop_is_clean():
    """S of the next block runs beside O of this one; both are used behind their waits only."""
    assert not findings(
        S,
        WAIT.format(0),
        "F2FP.BF16.F32.PACK_AB R56, R25, R24",
        "loop:",
        S,
        O,
        "FADD R2, R3, R4",
        WAIT.format(1),
        "FMUL R24, R24, R2",
        WAIT.format(0),
        "F2FP.BF16.F32.PACK_AB R56, R25, R24",
        "FMUL R40, R40, R2",
        "@P0 BRA {loop}",
        "STG.E.128 desc[UR4][R2.64], R40",
        "EXIT",
    )


def test_chain_of_products_on_one_accumulator_is_clean():
    chain = "HGMMA.64x16x16.F32 R24, R56, gdesc[UR4], R24"
    assert not findings(chain, chain, chain + ", gsb0", WAIT.format(0), "MOV R24, R56", "EXIT")


def test_operands_in_flight_may_be_read():
    assert not findings(O, "FADD R2, R56, R57", WAIT.format(0), "EXIT")


# ---- Touched in one block ----


@pytest.mark.parametrize(
    ("product", "instruction", "wanted"),
    [
        (S, "FADD R2, R31, R3", "FADD.* reads the accumulator of .*HGMMA"),
        (S, "MOV R31, R2", "MOV.* writes the accumulator"),
        (S, "STG.E.128 desc[UR4][R2.64], R28", "reads the accumulator"),
        (S, "CS2R R30, SRZ", "writes the accumulator"),
        (S, "@!P0 LDS.128 R20, [R2]", None),
        (S, "@!P0 LDS.128 R22, [R2]", "writes the accumulator"),
        (S, "SHFL.BFLY PT, R24, R2, 0x1, 0x1f", "writes the accumulator"),
        (O, "F2FP.BF16.F32.PACK_AB R59, R2, R3", "F2FP.* writes operands"),
        (O, "LDSM.16.M88.4 R53, [R2]", "writes operands"),
        (O, "LDSM.16.M88.4 R52, [R2]", None),
        (O, "IMAD.WIDE.U32 R58, R2, R3, R4", "writes operands"),
        (O, "MOV R60, R2", None),
        (O, "HGMMA.64x16x16.F32 R56, gdesc[UR4], R56, gsb0", "writes operands"),
        (O, "HGMMA.64x16x16.F32 R72, R44, gdesc[UR4], R72, gsb0", "reads the accumulator"),
        (O, "HGMMA.64x24x16.F32 R40, gdesc[UR4], R40, gsb0", "writes the accumulator"),
        (O, "HGMMA.64x16x16.F16 R36, gdesc[UR4], R36, gsb0", None),
    ],
)
def test_register_of_a_product_in_flight(product, instruction, wanted):
    found = findings(product, instruction, WAIT.format(0), "EXIT")
    assert_found(found, *([wanted] if wanted else []))
    assert not findings(product, WAIT.format(0), instruction, "EXIT")


def test_first_product_of_a_chain_counts_as_well():
    first = "HGMMA.64x16x16.F32 R40, R56, gdesc[UR8], R40"
    second = "HGMMA.64x16x16.F32 R40, R60, gdesc[UR8], R40, gsb0"
    assert_found(findings(first, "MOV R56, R2", second, WAIT.format(0), "EXIT"), "writes operands")


# ---- Groups ----


def test_partial_wait_leaves_the_newest_group_in_flight():
    touched = ("FADD R2, R24, R3", "FADD R2, R40, R3")
    assert_found(
        findings(S, O, WAIT.format(1), *touched, WAIT.format(0), "EXIT"),
        r"/\*0040\*/ FADD R2, R40, R3 reads",
    )
    assert len(findings(S, O, WAIT.format(2), *touched, WAIT.format(0), "EXIT")) == 2


def test_wait_does_not_complete_what_was_not_committed():
    open_group = S.removesuffix(", gsb0")
    assert_found(findings(open_group, WAIT.format(0), "MOV R24, R2", "EXIT"), "writes")


def test_empty_group_counts():
    empty = "HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0"
    assert not findings(S, empty, WAIT.format(1), "MOV R24, R2", "EXIT")


def test_commit_and_wait_under_a_predicate_may_not_happen():
    assert_found(findings(S, "@P0 " + WAIT.format(0), "MOV R24, R2", "EXIT"), "writes")
    assert_found(findings(S, "@P0 " + O, WAIT.format(1), "MOV R24, R2", "EXIT"), "writes")
    assert_found(findings("@P0 " + S, "MOV R24, R2", "EXIT"), "writes")


# ---- Control flow ----


def test_hazard_across_a_back_edge():
    """The wait at the loop's end leaves O's group pending; the next iteration writes its A."""
    loop = ("loop:", "MOV R56, R2", O, WAIT.format(1), "@P0 BRA {loop}")
    assert_found(findings(*loop, WAIT.format(0), "EXIT"), r"/\*0000\*/ MOV R56.* writes operands")
    assert not findings(loop[0], WAIT.format(0), *loop[1:], WAIT.format(0), "EXIT")


def test_groups_are_counted_around_the_loop():
    """S's group is the second newest at the loop's end: wait<1> completes it, wait<2> does not."""
    loop = ("loop:", "MOV R24, R2", S, O)
    end = ("@P0 BRA {loop}", WAIT.format(0), "EXIT")
    assert_found(findings(*loop, WAIT.format(2), *end), "MOV R24.* writes the accumulator")
    assert not findings(*loop, WAIT.format(1), *end)


@pytest.mark.parametrize("branch", ["@P0 BRA {past}", "BRA P1, {past}", "BRA.DIV UR4, {past}"])
def test_wait_on_one_side_of_a_branch(branch):
    """A conditional branch is followed both ways."""
    touch = "FADD R2, R24, R3"
    taken = findings(S, branch, WAIT.format(0), "past:", touch, "EXIT")
    not_taken = findings(S, branch, touch, "past:", WAIT.format(0), "EXIT")
    for found in (taken, not_taken):
        assert_found(found, "FADD.* reads the accumulator")


def test_taken_branch_skips_what_lies_between():
    assert not findings(S, "BRA {past}", "MOV R24, R2", "past:", WAIT.format(0), "EXIT")


def test_hazard_in_a_called_function():
    call = (S, "CALL.REL.NOINC {function}", WAIT.format(0), "EXIT", "function:")
    back = "RET.REL.NODEC R4 0x0"
    assert_found(findings(*call, "MUFU.RCP R31, R3", back), "MUFU.RCP.* writes the accumulator")
    assert not findings(*call, "MUFU.RCP R32, R3", back)


def test_function_returns_to_its_caller_only():
    """The first call returns with S in flight: not to the code behind the second."""
    code = (
        S,
        "CALL.REL.NOINC {function}",
        WAIT.format(0),
        "CALL.REL.NOINC {function}",
        "MOV R24, R2",
        "EXIT",
        "function:",
        "RET.REL.NODEC R4 0x0",
    )
    assert not findings(*code)
    assert_found(findings(*code[:2], "NOP", *code[3:]), "MOV R24, R2 writes the accumulator")


def test_functions_that_call_functions():
    """After both returns control is behind the first call, where S is still in flight."""
    back = "RET.REL.NODEC R4 0x0"
    found = findings(
        *(S, "CALL.REL.NOINC {outer}", "MOV R24, R2", "EXIT"),
        *("outer:", "CALL.REL.NOINC {inner}", "NOP", back),
        *("inner:", "NOP", back),
    )
    assert_found(found, "MOV R24, R2 writes the accumulator")


def test_unknown_code_is_a_finding():
    assert_found(findings(S, "CALL.ABS.NOINC R2", WAIT.format(0), "EXIT"), "unknown code")
    assert not findings(S, WAIT.format(0), "CALL.ABS.NOINC R2", "EXIT")
    assert_found(findings(S, "BRX R2 -0x10"), "unknown code")
    assert_found(findings("BRX R2 -0x10", S, "EXIT"), "no path was found to .*HGMMA")
    assert not findings("@P0 BRX R2 -0x10", S, WAIT.format(0), "EXIT")


def test_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_wgmma", str(tmp_path), "--table"])
    for middle, status in (("NOP", 0), ("MOV R56, R2", 1)):
        text = listing(O, middle, WAIT.format(0), "EXIT")
        monkeypatch.setattr(check_wgmma, "disassemble", lambda path, text=text: text)
        assert check_wgmma.main() == status
        printed = capsys.readouterr()
        assert f"1 with wgmma, {status} findings" in printed.out
        assert ("error: fwd_kernel (sm_90a) /*0010*/ MOV R56, R2 writes" in printed.err) == status
    monkeypatch.setattr(check_wgmma, "disassemble", lambda path: "")
    assert check_wgmma.main() == 1


# ---- Registers of other instructions ----


@pytest.mark.parametrize(
    ("instruction", "read", "written"),
    [
        ("ISETP.GE.AND P0, PT, R4, R5, PT", {4, 5}, set()),
        ("LOP3.LUT P0, R2, R4, 0x1, RZ, 0xc0, !PT", {4}, {2}),
        ("IMAD.WIDE.U32 R2, P0, R4, R19, R8", {4, 19, 8, 9}, {2, 3}),
        ("IMAD.HI.U32 R2, P1, R5, R17, R2", {5, 17, 2, 3}, {2}),
        ("SHF.R.U32.HI R2, RZ, 0x7, R0", {0}, {2}),
        ("HMMA.16816.F32 R4, R8, R12, R4", {8, 9, 10, 11, 12, 13, 4, 5, 6, 7}, {4, 5, 6, 7}),
        ("STSM.16.M88.4 [R2+UR4], R8", {2, 8, 9, 10, 11}, set()),
        ("LDG.E.64 R2, desc[UR4][R6.64+0x8]", {6, 7}, {2, 3}),
        ("ATOMG.E.ADD.STRONG.GPU PT, R2, desc[UR4][R4.64], R6", {4, 5, 6}, {2}),
        ("FFMA R2, -R3, |R4|.reuse, R5", {3, 4, 5}, {2}),
        ("BAR.SYNC.DEFER_BLOCKING R4, R5", {4, 5}, set()),
        ("R2UR UR4, R5", {5}, set()),
        ("CS2R.32 R2, SR_CLOCKLO", set(), {2}),
        ("DADD R2, R4, R6", {4, 5, 6, 7}, {2, 3}),
        ("UIADD3 UR4, UR5, UR6, URZ", set(), set()),
    ],
)
def test_registers(instruction, read, written):
    (kernel,) = sass.parse(listing(instruction))
    assert sass.registers(kernel.instructions[0]) == (read, written)
