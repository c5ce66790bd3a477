// The Python module flashattn_ext._C: plans and build facts. The ops register themselves with torch
// (ops.cpp, autograd.cpp, merge.cpp, cuda.cpp) when this library is loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "flashattn_ext_build_info.h"
#include "plan/explain.h"

namespace py = pybind11;

namespace flashattn_ext {
namespace {

void bind_problem(py::module_& m) {
  py::enum_<Op>(m, "Op").value("forward", Op::kForward).value("backward", Op::kBackward);
  py::enum_<ScalarType>(m, "ScalarType")
      .value("float16", ScalarType::kFloat16)
      .value("bfloat16", ScalarType::kBFloat16)
      .value("float32", ScalarType::kFloat32)
      .value("float64", ScalarType::kFloat64)
      .value("other", ScalarType::kOther);

  py::class_<Strides>(m, "Strides")
      .def(py::init<>())
      .def_readwrite("batch", &Strides::batch)
      .def_readwrite("row", &Strides::row)
      .def_readwrite("head", &Strides::head);
  py::class_<Layout>(m, "Layout")
      .def(py::init<>())
      .def_readwrite("strides", &Layout::strides)
      .def_readwrite("contiguous_last", &Layout::contiguous_last)
      .def_readwrite("aligned", &Layout::aligned);
  py::class_<Problem>(m, "Problem")
      .def(py::init<>())
      .def_readwrite("op", &Problem::op)
      .def_readwrite("dtype", &Problem::dtype)
      .def_readwrite("varlen", &Problem::varlen)
      .def_readwrite("batch", &Problem::batch)
      .def_readwrite("num_heads_q", &Problem::num_heads_q)
      .def_readwrite("num_heads_k", &Problem::num_heads_k)
      .def_readwrite("seqlen_q", &Problem::seqlen_q)
      .def_readwrite("seqlen_k", &Problem::seqlen_k)
      .def_readwrite("head_dim", &Problem::head_dim)
      .def_readwrite("head_dim_v", &Problem::head_dim_v)
      .def_readwrite("total_q", &Problem::total_q)
      .def_readwrite("total_k", &Problem::total_k)
      .def_readwrite("q", &Problem::q)
      .def_readwrite("k", &Problem::k)
      .def_readwrite("v", &Problem::v)
      .def_readwrite("out", &Problem::out)
      .def_readwrite("dout", &Problem::dout)
      .def_readwrite("causal", &Problem::causal)
      .def_readwrite("top_left", &Problem::top_left)
      .def_readwrite("window_left", &Problem::window_left)
      .def_readwrite("window_right", &Problem::window_right)
      .def_readwrite("options", &Problem::options)
      .def_readwrite("plain_logits", &Problem::plain_logits)
      .def_readwrite("deterministic", &Problem::deterministic)
      .def_readwrite("rather_deterministic", &Problem::rather_deterministic);

  py::dict options;  // keyword argument -> Option bit
  options["bias"] = static_cast<uint32_t>(kBias);
  options["key_bias"] = static_cast<uint32_t>(kKeyBias);
  options["mask"] = static_cast<uint32_t>(kMask);
  options["alibi_slopes"] = static_cast<uint32_t>(kAlibiSlopes);
  options["rel_bias"] = static_cast<uint32_t>(kRelBias);
  options["sink"] = static_cast<uint32_t>(kSink);
  options["block_mask"] = static_cast<uint32_t>(kBlockMask);
  options["dropout_p"] = static_cast<uint32_t>(kDropout);
  m.attr("OPTION_BITS") = options;
}

void bind_device_info(py::module_& m) {
  py::class_<DeviceInfo>(m, "DeviceInfo")
      .def(py::init<>())
      .def_readwrite("is_cuda", &DeviceInfo::is_cuda)
      .def_readwrite("cc_major", &DeviceInfo::cc_major)
      .def_readwrite("cc_minor", &DeviceInfo::cc_minor)
      .def_readwrite("num_sms", &DeviceInfo::num_sms)
      .def_readwrite("smem_per_block_bytes", &DeviceInfo::smem_per_block_bytes)
      .def_readwrite("smem_per_sm_bytes", &DeviceInfo::smem_per_sm_bytes);
}

void bind_explain(py::module_& m) {
  py::class_<KernelReport>(m, "KernelReport")
      .def_readonly("name", &KernelReport::name)
      .def_readonly("grid", &KernelReport::grid)
      .def_readonly("block_m", &KernelReport::block_m)
      .def_readonly("block_n", &KernelReport::block_n)
      .def_readonly("num_warps", &KernelReport::num_warps)
      .def_readonly("stages", &KernelReport::stages)
      .def_readonly("smem_bytes", &KernelReport::smem_bytes);
  py::class_<Rejection>(m, "Rejection")
      .def_readonly("family", &Rejection::family)
      .def_readonly("reason", &Rejection::reason);
  py::class_<Explanation>(m, "Explanation")
      .def_readonly("family", &Explanation::family)
      .def_readonly("error", &Explanation::error)
      .def_readonly("kernels", &Explanation::kernels)
      .def_readonly("rejected", &Explanation::rejected)
      .def_readonly("copies", &Explanation::copies)
      .def_readonly("empty", &Explanation::empty)
      .def_readonly("deterministic", &Explanation::deterministic)
      .def_readonly("workspace_bytes", &Explanation::workspace_bytes)
      .def_readonly("workspace_formula", &Explanation::workspace_formula)
      .def_property_readonly("window", [](const Explanation& explanation) {
        const auto bound = [](int32_t keys) { return keys == kUnlimited ? -1 : keys; };
        return py::make_tuple(bound(explanation.window.left), bound(explanation.window.right));
      });
  m.def("explain", &explain, py::arg("problem"), py::arg("device"), py::arg("forced") = "",
        "The plan of a problem on a device; `forced` names the only family to ask.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Native part of flashattn_ext: plans and build facts; importing it registers the ops.";
  m.attr("stamp") = build_info::kStamp;
  bind_problem(m);
  bind_device_info(m);
  bind_explain(m);

  py::list families;  // (name, what it is)
  for (const Family* family : flashattn_ext::families()) {
    families.append(py::make_tuple(family->name, family->summary));
  }
  m.attr("FAMILIES") = families;
}

}  // namespace flashattn_ext
