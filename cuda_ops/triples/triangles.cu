// Triangles of a graph: count them for each edge, and write them where a scan of the counts says; or add up products
// over them, without writing them down. Operators write into tensors that they are given.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "triangles.h"

namespace {

using fxopt::Oriented;
using fxopt::Products;
using torch::stable::Tensor;

constexpr int kThreads = 256;
constexpr int kLanes = 32;  // channels that neighbouring threads take of one edge

__global__ void count_kernel(Oriented graph, int64_t edges, int64_t* counts) {
  const int64_t edge = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (edge < edges) counts[edge] = fxopt::count_triangles(graph, edge);
}

__global__ void fill_kernel(Oriented graph, int64_t edges, const int64_t* starts, int64_t total, int64_t* found) {
  const int64_t edge = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (edge < edges) fxopt::write_triangles(graph, edge, starts[edge], total, found);
}

__global__ void products_kernel(Oriented graph, int64_t edges, Products tables) {
  const int64_t edge = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (edge >= edges) return;
  for (int64_t channel = threadIdx.x; channel < tables.channels; channel += kLanes)
    fxopt::add_products(graph, tables, edge, channel);
}

Oriented oriented(const Tensor& source, const Tensor& target, const Tensor& starts) {
  return {source.const_data_ptr<int64_t>(), target.const_data_ptr<int64_t>(), starts.const_data_ptr<int64_t>()};
}

cudaStream_t stream_of(const Tensor& tensor) {
  void* stream = nullptr;
  const auto code = aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream);
  STD_TORCH_CHECK(code == 0, "triangles: no CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "triangles: ", cudaGetErrorString(error));
}

unsigned blocks(int64_t edges, int64_t a_block) { return static_cast<unsigned>((edges + a_block - 1) / a_block); }

float* wanted(const Tensor& table) { return table.numel() ? table.mutable_data_ptr<float>() : nullptr; }

void count(const Tensor& source, const Tensor& target, const Tensor& starts, const Tensor& counts) {
  const int64_t edges = source.numel();
  if (!edges) return;
  count_kernel<<<blocks(edges, kThreads), kThreads, 0, stream_of(source)>>>(
      oriented(source, target, starts), edges, counts.mutable_data_ptr<int64_t>());
  check_launch();
}

void fill(const Tensor& source, const Tensor& target, const Tensor& starts, const Tensor& places, const Tensor& found) {
  const int64_t edges = source.numel(), total = found.size(1);
  if (!total) return;
  fill_kernel<<<blocks(edges, kThreads), kThreads, 0, stream_of(source)>>>(
      oriented(source, target, starts), edges, places.const_data_ptr<int64_t>(), total,
      found.mutable_data_ptr<int64_t>());
  check_launch();
}

void products(
    const Tensor& source, const Tensor& target, const Tensor& starts, const Tensor& order, const Tensor& cell,
    const Tensor& p, const Tensor& q, const Tensor& r, const Tensor& g,
    const Tensor& of_p, const Tensor& of_q, const Tensor& of_r, const Tensor& of_g) {
  const int64_t edges = source.numel(), channels = p.size(1);
  if (!edges || !channels) return;
  const Products tables{
      order.const_data_ptr<int64_t>(), cell.const_data_ptr<int64_t>(),
      p.const_data_ptr<float>(), q.const_data_ptr<float>(), r.const_data_ptr<float>(), g.const_data_ptr<float>(),
      wanted(of_p), wanted(of_q), wanted(of_r), wanted(of_g), channels};
  const dim3 threads(kLanes, kThreads / kLanes);
  products_kernel<<<blocks(edges, threads.y), threads, 0, stream_of(source)>>>(
      oriented(source, target, starts), edges, tables);
  check_launch();
}

}  // namespace

STABLE_TORCH_LIBRARY(fxopt_triangles, library) {
  library.def("count(Tensor source, Tensor target, Tensor starts, Tensor(a!) counts) -> ()");
  library.def("fill(Tensor source, Tensor target, Tensor starts, Tensor places, Tensor(a!) found) -> ()");
  library.def(
      "products(Tensor source, Tensor target, Tensor starts, Tensor order, Tensor cell, "
      "Tensor p, Tensor q, Tensor r, Tensor g, "
      "Tensor(a!) of_p, Tensor(b!) of_q, Tensor(c!) of_r, Tensor(d!) of_g) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fxopt_triangles, CUDA, library) {
  library.impl("count", TORCH_BOX(&count));
  library.impl("fill", TORCH_BOX(&fill));
  library.impl("products", TORCH_BOX(&products));
}
